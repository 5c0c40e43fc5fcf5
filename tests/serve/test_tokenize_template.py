"""/tokenize renders a history exactly as a chat completion does, with the template that `--chat-template` names."""

import pytest
from helpers.clients import open_clients

from trioengine import EngineConfig

CALL = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
HISTORY = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "12"},
    {"role": "user", "content": "And now?"},
]
TEMPLATES = {
    "tools and reasoning": """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for message in messages %}{{ message.reasoning_content or "" }}|{{ message.content }}
{%- for call in message.tool_calls or [] %}({{ call.function | tojson }}){% endfor %}{% endfor %}""",
    "llama3": "{# <|python_tag|> #}{% for message in messages %}{{ message.content }}|{% endfor %}",
    "text": "{% for message in messages %}{{ message.content }}|{% endfor %}",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("parser", ["auto", "json"])
async def test_a_history_has_the_tokens_that_a_chat_has(autojump_clock, tmp_path, source, parser):
    path = tmp_path / "template.jinja"
    path.write_text(source)
    async with open_clients(EngineConfig(model="toy", chat_template=str(path)), tool_call_parser=parser) as clients:
        chat = (await clients.chat(messages=HISTORY, return_token_ids=True)).json
        answer = await clients.request("POST", "/tokenize", {"messages": HISTORY})
        assert answer.json["tokens"] == chat["prompt_token_ids"]
