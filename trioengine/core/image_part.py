"""Images in messages: as clients send them, and as the engine keeps them, without their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trioengine.core.arguments import rejected
from trioengine.core.bounds import brief
from trioengine.core.image import ImageInfo

MAX_IMAGE_BYTES = 20 << 20
_DETAILS = (None, "auto", "low", "high", "original")


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image of a conversation, equal to itself alone.

    A message has it as a part of its content: `{"type": "image", "image": Image(...)}`. The keeper of the bytes finds
    them by `handle`, which nothing else looks into.
    """

    info: ImageInfo
    handle: object = field(repr=False)

    @property
    def part(self) -> dict[str, Any]:
        """As a part of a message's content."""
        return {"type": "image", "image": self}


def is_image_part(part: object) -> bool:
    """Whether this is the part of a message's content that Image.part gives."""
    return isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), Image)


def image_url(part: Mapping[str, Any], where: str) -> str | None:
    """The URL of OpenAI's image parts; None for other parts.

    Chat completions have `{"type": "image_url", "image_url": {"url": …, "detail": …}}`, Realtime and Responses
    `{"type": "input_image", "image_url": …, "detail": …}`. The detail, a hint, is checked and has no effect. Raises
    RequestRejected for a part without a URL, naming the field.
    """
    if part.get("type") == "image_url":
        held, where = part.get("image_url"), f"{where}.image_url"
        if not isinstance(held, Mapping):
            raise rejected(where, f"must be an object with a url, got {brief(held)}")
        url, detail, param = held.get("url"), held.get("detail"), f"{where}.url"
    elif part.get("type") == "input_image":
        url, detail, param = part.get("image_url"), part.get("detail"), f"{where}.image_url"
    else:
        return None
    if not isinstance(url, str):
        raise rejected(param, f"must be a string, got {brief(url)}")
    if detail not in _DETAILS:
        raise rejected(f"{where}.detail", f"must be auto, low, high or original, got {brief(detail)}")
    return url
