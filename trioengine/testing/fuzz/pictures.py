"""The pictures of fuzzed programs, and the errors that each must cause."""

from __future__ import annotations

import base64
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.image_part import is_image_part
from trioengine.testing.fuzz import inside
from trioengine.testing.toy_model import UNREADABLE as UNREADABLE_BYTES
from trioengine.testing.toy_model import DamagedPicture, ToyImage, ToyPicture, toy_file

PAYLOAD_MEMORY = 500  # bytes: two pictures, and not three
MAX_PAYLOADS = 3  # descriptors
UNREADABLE, HUGE, DAMAGED, GARBAGE = "unreadable", "huge", "damaged", "garbage"
FILE = ".file"  # the end of the name of a picture that is sent as a file
_SHAPES = {
    "one": (8, 8, 1),
    "two": (8, 8, 2),  # of the same size
    "wide": (16, 4, 3),  # two tiles
    "dot": (4, 4, 5),  # so small that descriptors run out first
    UNREADABLE: (8, 4, 255),  # by the worker
    HUGE: (16, 11, 4),  # larger than the whole budget
}


@dataclass(frozen=True)
class PictureFile:
    """An encoded picture, of this size as its header says."""

    size: tuple[int, int]
    data: bytes

    @property
    def url(self) -> str:
        """As clients of a server send it."""
        kind = "jpeg" if self.data.startswith(b"\xff") else "png"
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode()}"


Picture: TypeAlias = ToyPicture | PictureFile
PICTURES: Mapping[str, Picture] = {
    **{name: ToyPicture(*shape) for name, shape in _SHAPES.items()},
    DAMAGED: DamagedPicture(8, 8),
    **{f"{name}{FILE}": PictureFile(shape[:2], toy_file(*shape)) for name, shape in _SHAPES.items()},
    f"{GARBAGE}{FILE}": PictureFile((8, 8), b"this is no image"),
}
MEDIA = (
    *("one", "one", "two", "two one", "one one"),
    *("wide", "wide two", "dot", "dot one", "dot dot"),
    *(UNREADABLE, f"one {UNREADABLE}", HUGE, DAMAGED, f"two {GARBAGE}{FILE}", f"one{FILE} two"),
)
FILES = tuple(  # what clients of a server send
    " ".join(f"{name}{FILE}" for name in media.split())
    for media in (
        *("one", "one", "two", "two one", "one one", "wide", "dot", "dot one"),
        *(UNREADABLE, f"one {UNREADABLE}", HUGE, GARBAGE, f"two {GARBAGE}"),
    )
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


def text_of(content: Content) -> str:
    """Its text."""
    return content.text if isinstance(content, Shown) else content


def pictures_of(content: Content) -> list[Picture]:
    """Its pictures."""
    return [PICTURES[name] for name in content.pictures] if isinstance(content, Shown) else []


def has(content: Content, kind: str) -> bool:
    """Whether one of its pictures is of this kind, whether or not it is sent as a file."""
    return isinstance(content, Shown) and any(name.removesuffix(FILE) == kind for name in content.pictures)


def media_of(content: Content) -> list[ToyPicture | bytes]:
    """Its pictures as a program hands them to the engine, as `media`."""
    return [_medium(picture) for picture in pictures_of(content)]


def _medium(picture: Picture) -> ToyPicture | bytes:
    return picture.data if isinstance(picture, PictureFile) else picture


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """These turns as chat messages."""
    return [{"role": role, "content": _parts(content)} for role, content in turns]


def _parts(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    images: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in media_of(content)]
    return [*images, {"type": "text", "text": content.text}]


def chat_content(content: Content) -> str | list[dict[str, Any]]:
    """The content of a message, as clients of chat completions send it."""
    if isinstance(content, str):
        return content
    images: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in _urls(content)]
    return [*images, {"type": "text", "text": content.text}]


def item_content(content: Content) -> list[dict[str, Any]]:
    """The content of an item, as clients of Realtime send it."""
    images: list[dict[str, Any]] = [{"type": "input_image", "image_url": url} for url in _urls(content)]
    return [*images, {"type": "input_text", "text": text_of(content)}]


def _urls(content: Content) -> list[str]:
    return [picture.url for picture in pictures_of(content) if isinstance(picture, PictureFile)]


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


_IN_THE_HISTORY = re.compile(r"history\[(\d+)\]\.content\[(\d+)\]")
_REFUSALS = {  # codes, and the pictures that they are for
    "too_large": HUGE,
    "image_parse_error": DAMAGED,
    "invalid_image_format": GARBAGE,
}


def check_dropped(error: EngineError, session: Session) -> None:
    """Right after a refusal: the image that it names was dropped."""
    if not isinstance(error, RequestRejected) or error.code != "image_dropped":
        return
    found = _IN_THE_HISTORY.fullmatch(error.param or "")
    assert found, f"only what is kept is dropped: {error!r} of {error.param}"
    message, part = map(int, found.groups())
    payload = inside.payload(session.history[message]["content"][part]["image"])
    assert payload.is_dropped, f"{payload} is there, and {error!r}"


def is_refused(code: str, content: Content) -> bool:
    """Whether a prompt with this content is refused with this code, before it comes to the worker."""
    return code in _REFUSALS and has(content, _REFUSALS[code])


def is_failed(code: str, turns: Iterable[Turn], dropped: Container[bytes]) -> bool:
    """Whether a request with these turns fails with this code; `dropped` are the bytes of images that are not kept."""
    contents = [content for _, content in turns]
    if code == "image_dropped":
        return any(picture.data in dropped for content in contents for picture in pictures_of(content))
    return code == "invalid_image" and any(has(content, UNREADABLE) for content in contents)


def check_seen(images: Iterable[ToyImage]) -> None:
    """There is an answer to these images: the worker could read each of them."""
    assert not any(data[:1] == UNREADABLE_BYTES for _, data in images), "it is answered, and an image cannot be read"


def check_failed_image(error: RequestRejected, generation: Generation, turns: tuple[Turn, ...]) -> bool:
    """Whether a request with this prompt, which was entered, had to fail with the error of an image."""
    if error.code == "image_dropped":
        return any(payload.is_dropped for payload in inside.prompt_payloads(generation))
    return is_failed(error.code, turns, ())
