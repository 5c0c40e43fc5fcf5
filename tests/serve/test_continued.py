"""Chat completions that continue the last message, and prompts without a generation prompt."""

import pytest
from helpers.clients import CHAT, chat

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so it "}]
CALL = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CALLED = {**MESSAGES[1], "tool_calls": [CALL]}  # which the template of this model does not print
OPEN = {"add_generation_prompt": False, "continue_final_message": True}


async def test_the_answer_goes_on(autojump_clock, clients):
    """An answer in two requests is the same as in one."""
    whole = (await clients.chat("a", max_tokens=12)).json["choices"][0]["message"]["content"]
    head = (await clients.chat("a", max_tokens=5)).json["choices"][0]["message"]["content"]
    messages = [MESSAGES[0], {"role": "assistant", "content": head}]
    rest = await clients.chat(messages=messages, max_tokens=7, **OPEN)
    assert head + rest.json["choices"][0]["message"]["content"] == whole
    streamed = await clients.chat(messages=messages, max_tokens=7, stream=True, **OPEN)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed.events[:-1])
    assert head + text == whole


@pytest.mark.parametrize("options", [OPEN, {"add_generation_prompt": False}, {"add_generation_prompt": True}])
async def test_the_prompt_is_the_tokenizer_s(autojump_clock, clients, options):
    answer = await clients.chat(messages=MESSAGES, **options)
    tokens = (await clients.request("POST", "/tokenize", {"messages": MESSAGES, **options})).json["tokens"]
    assert tokens == clients.engine.tokenizer.apply_chat_template(MESSAGES, **options)
    assert answer.json["usage"]["prompt_tokens"] == len(tokens)


REFUSED = [
    ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "continue_final_message"),
    ({"continue_final_message": 1, "add_generation_prompt": False}, "invalid_type", "continue_final_message"),
    ({**OPEN, "messages": MESSAGES[:1]}, "invalid_value", "messages"),
    ({**OPEN, "messages": [MESSAGES[0], CALLED]}, "invalid_value", "messages"),
    (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        "invalid_value",
        "chat_template_kwargs.add_generation_prompt",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_what_is_refused(autojump_clock, clients, fields, code, param):
    answer = await clients.request("POST", CHAT, chat(**{"messages": MESSAGES, **fields}))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)
    assert answer.error["message"].startswith(param)


async def test_tokenize_refuses_a_message_with_calls(autojump_clock, clients):
    answer = await clients.request("POST", "/tokenize", {"messages": [MESSAGES[0], CALLED], **OPEN})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", "messages")
    assert answer.error["message"] == "messages: with continue_final_message the last one must not have tool_calls"


async def test_tokenize_refuses_it_with_a_text(autojump_clock, clients):
    answer = await clients.request("POST", "/tokenize", {"prompt": "a", "continue_final_message": True})
    assert (answer.status, answer.error["param"]) == (400, "continue_final_message")
