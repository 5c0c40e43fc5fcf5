"""Pictures in a program of the fuzzer: a handful, by name, so that the same one comes again in other requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trioengine.core.image_part import is_image_part
from trioengine.testing.toy_vision import ToyPicture

PAYLOAD_MEMORY = 500  # bytes: two pictures, and not three
MAX_PAYLOADS = 3  # descriptors
UNREADABLE, HUGE = "unreadable", "huge"
PICTURES = {
    "one": ToyPicture(8, 8, 1),
    "two": ToyPicture(8, 8, 2),  # of the same size
    "wide": ToyPicture(16, 4, 3),  # two tiles
    "dot": ToyPicture(4, 4, 5),  # so small that descriptors are what is short
    UNREADABLE: ToyPicture(8, 4, 255),
    HUGE: ToyPicture(16, 16, 4),  # larger than the whole budget
}
MEDIA = (
    *("one", "one", "two", "two one", "one one"),
    *("wide", "wide two", "dot", "dot one", "dot dot"),
    *(UNREADABLE, f"one {UNREADABLE}", HUGE),
)


@dataclass(frozen=True)
class Shown:
    """The content of a message with pictures, by their names; its text is behind them."""

    pictures: tuple[str, ...]
    text: str


Content: TypeAlias = str | Shown
Turn: TypeAlias = tuple[str, Content]  # role and content


def content_of(media: str, text: str) -> Content:
    """A message's content with these pictures, named one after the other."""
    return Shown(tuple(media.split()), text) if media else text


def pictures_in(content: Content) -> tuple[str, ...]:
    """The pictures' names."""
    return content.pictures if isinstance(content, Shown) else ()


def pictures_of(content: Content) -> list[ToyPicture]:
    """The pictures themselves, as `media`."""
    return [PICTURES[name] for name in pictures_in(content)]


def num_bytes(content: Content) -> int:
    """The size of the payloads."""
    return sum(len(picture.data) for picture in pictures_of(content))


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """These turns as chat messages."""
    return [{"role": role, "content": _parts(content)} for role, content in turns]


def _parts(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    images: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures_of(content)]
    return [*images, {"type": "text", "text": content.text}]


def outline(content: Content) -> object:
    """The content as far as a history shows it: of a picture its size."""
    if isinstance(content, str):
        return content
    return tuple(picture.size for picture in pictures_of(content)), content.text


def outline_of(message: Mapping[str, Any]) -> object:
    """The same of a message of a history."""
    content = message["content"]
    if isinstance(content, str):
        return content
    infos = [part["image"].info for part in content if is_image_part(part)]
    text = "".join(part["text"] for part in content if not is_image_part(part))
    return tuple((info.width, info.height) for info in infos), text
