"""The chat templates of the toy model: ChatML, with images, and with tools whose names and calls take little room."""

from __future__ import annotations

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOOLS = (  # as a message before the others
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}<|im_end|>\n{% endif %}"
)
_CALLS = (  # behind the content of their message
    "{% for call in message['tool_calls'] %}"
    "[{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}]{% endfor %}"
)

_FORMS = {"hermes": "", "llama3": '{# "parameters" #}'}  # comments by which a model's form of calls is known


def toy_template(*, images: bool, prints_tools: bool, tool_form: str) -> str:
    """Return the template of a model that takes images or not, and prints tools and their calls or not."""
    template = _FORMS[tool_form] + (_IMAGE_TEMPLATE if images else CHAT_TEMPLATE)
    return _TOOLS + template.replace("<|im_end|>", f"{_CALLS}<|im_end|>", 1) if prints_tools else template
