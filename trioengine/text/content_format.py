"""The contents of messages that a chat template takes, found by rendering a message of one word.

Most templates print a content that is a string. Those of models with images often loop over a list of parts, and print
nothing of a string.
"""

from __future__ import annotations

from typing import Any

from trioengine.core.errors import RequestRejected
from trioengine.text.chat_template import ChatTemplate

IMAGE_PART = {"type": "image"}
_WORD = "trioengine"


def text_part(text: str) -> dict[str, str]:
    """A text as a part of a content."""
    return {"type": "text", "text": text}


def takes_parts_only(template: ChatTemplate) -> bool:
    """Whether the template prints a text that is a part of a list, and not one that is the content itself."""
    return _WORD not in _rendered(template, _WORD) and _WORD in _rendered(template, [text_part(_WORD)])


def prints_images(template: ChatTemplate, image_token: str) -> bool:
    """Whether the template prints the token for an image, and the text beside it."""
    rendering = _rendered(template, [IMAGE_PART, text_part(_WORD)])
    return rendering.count(image_token) == 1 and _WORD in rendering


def _rendered(template: ChatTemplate, content: Any) -> str:
    """A message with this content; "" if the template refuses it."""
    try:
        return template.render([{"role": "user", "content": content}], add_generation_prompt=False)
    except RequestRejected:
        return ""
