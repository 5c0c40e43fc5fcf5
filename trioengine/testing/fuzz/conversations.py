"""The conversations of fuzzed programs: texts and pictures, their prompts, and the answers of the toy model."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.image import is_image_part
from trioengine.core.types import ToolCall
from trioengine.testing.fuzz import inside_payloads
from trioengine.testing.toy_model import (
    TOY_PROCESSING,
    DamagedPicture,
    ToyImage,
    ToyPicture,
    toy_file,
    toy_model,
)
from trioengine.testing.toy_model import UNREADABLE as UNREADABLE_BYTES
from trioengine.text.chat_tokenizer import ChatTokenizer

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
    """An encoded picture with this size in its header."""

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
FILES = tuple(  # pictures that clients of a server send
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


@dataclass(frozen=True)
class Called:
    """The content of an answer with calls; its text is before them."""

    text: str
    calls: tuple[ToolCall, ...]

    @property
    def printed(self) -> str:
        """As the chat template of the toy model prints it."""
        return self.text + "".join(f"[{call.name} {json.dumps(json.loads(call.arguments))}]" for call in self.calls)


@dataclass(frozen=True)
class Result:
    """The content of a message with the result of a call."""

    text: str
    call_id: str


Content: TypeAlias = str | Shown | Called | Result
Turn: TypeAlias = tuple[str, Content]  # role and content
RAW = "token ids"  # the role of a turn of raw token ids: each character of its content stands for one


LONG: tuple[Turn, ...] = (  # two turns that leave room in the context for a short answer to a short prompt
    *(("user", "to be or not"), ("assistant", "that")),
    *(("user", "is"), ("assistant", "so")),
)


def content_of(media: str, text: str) -> Content:
    """A message's content with these pictures, named one after the other."""
    return Shown(tuple(media.split()), text) if media else text


def raw_turn(token_ids: Iterable[int]) -> Turn:
    """A turn of raw token ids: a prompt, or an answer to one."""
    return RAW, "".join(map(chr, token_ids))


def is_mixed(turns: Iterable[Turn]) -> bool:
    """Whether there are both messages and raw token ids, which no conversation may have."""
    return len({role == RAW for role, _ in turns}) > 1


def text_of(content: Content) -> str:
    """Its text, with its calls."""
    if isinstance(content, Called):
        return content.printed
    return content if isinstance(content, str) else content.text


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
    return [{"role": role, **_fields(content)} for role, content in turns]


def _fields(content: Content) -> dict[str, Any]:
    match content:
        case Called(text, calls):
            return {"content": text or None, "tool_calls": [call.to_json() for call in calls]}
        case Result(text, call_id):
            return {"content": text, "tool_call_id": call_id}
    return {"content": _parts(content)}


def _parts(content: Content) -> str | list[dict[str, Any]]:
    if not isinstance(content, Shown):
        return text_of(content)
    images: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in media_of(content)]
    return [*images, {"type": "text", "text": content.text}]


def chat_content(content: Content) -> str | list[dict[str, Any]]:
    """The content of a message, as clients of chat completions send it."""
    if not isinstance(content, Shown):
        return text_of(content)
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
    match content:
        case Called(text, calls):
            return text, calls
        case Result(text, call_id):
            return text, call_id
        case Shown(text=text):
            return tuple(picture.size for picture in pictures_of(content)), text
    return content


def outline_of(message: Mapping[str, Any]) -> object:
    """The same of a message of a history."""
    content = message["content"]
    if "tool_calls" in message:
        return content, tuple(_call_of(call) for call in message["tool_calls"])
    if "tool_call_id" in message:
        return content, message["tool_call_id"]
    if isinstance(content, str):
        return content
    infos = [part["image"].info for part in content if is_image_part(part)]
    text = "".join(part["text"] for part in content if not is_image_part(part))
    return tuple((info.width, info.height) for info in infos), text


def _call_of(call: Mapping[str, Any]) -> ToolCall:
    return ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])


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
    assert found, f"only kept images are dropped: {error!r} of {error.param}"
    message, part = map(int, found.groups())
    payload = inside_payloads.payload(session.history[message]["content"][part]["image"])
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
        return any(payload.is_dropped for payload in inside_payloads.prompt_payloads(generation))
    return is_failed(error.code, turns, ())


_PLACES = dict(enumerate(PICTURES.values(), 14))  # by a byte that no text has
_BYTES = {name: chr(place) for place, name in zip(_PLACES, PICTURES, strict=True)}


class FuzzPrompt(NamedTuple):
    """A prompt's token ids, and its images: where their tiles begin, and their bytes."""

    token_ids: tuple[int, ...]
    images: tuple[ToyImage, ...]


@lru_cache(maxsize=1 << 14)
def prompt_of(turns: tuple[Turn, ...]) -> FuzzPrompt:
    """The whole conversation rendered and tokenized at once, which the engine never does."""
    assert not is_mixed(turns), f"messages and token ids are in one conversation: {turns}"
    if turns and turns[0][0] == RAW:
        return FuzzPrompt(tuple(ord(each) for _, content in turns for each in text_of(content)), ())
    model = toy_model()
    tokenizer = ChatTokenizer(model.tokenizer, model.chat_template)
    messages = [{"role": role, "content": _marked(content)} for role, content in turns]
    ids: list[int] = []
    images: list[ToyImage] = []
    for token_id in tokenizer.apply_chat_template(messages):
        if token_id not in _PLACES:
            ids.append(token_id)
            continue
        starts = []
        for _ in range(TOY_PROCESSING.num_tiles(*_PLACES[token_id].size)):
            starts.append(len(ids) + 1)
            ids += [ord("["), *[TOY_PROCESSING.image_token_id] * TOY_PROCESSING.tokens_per_tile]
        ids.append(ord("]"))
        images.append((tuple(starts), _PLACES[token_id].data))
    return FuzzPrompt(tuple(ids), tuple(images))


def _marked(content: Content) -> str:
    """A byte in the place of each picture."""
    if isinstance(content, Shown):
        return "".join(_BYTES[name] for name in content.pictures) + content.text
    return text_of(content)


def prompt_ids(turns: tuple[Turn, ...]) -> tuple[int, ...]:
    """The token ids of `prompt_of`."""
    return prompt_of(turns).token_ids


def shortened(
    turns: tuple[Turn, ...], max_model_len: int, max_tokens: int, before: tuple[Turn, ...] = ()
) -> tuple[tuple[Turn, ...], int]:
    """The messages without the fewest oldest turns, so that there is room for the answer; and how many these are.

    If that is not enough, all but the newest turn are left out. `before` comes before the messages in the prompt.
    """
    first = next((index for index, (role, _) in enumerate(turns) if role != "system"), len(turns))
    starts = [index for index, (role, _) in enumerate(turns) if index == first or (index > first and role == "user")]
    kept = [(*turns[:first], *turns[start:]) for start in starts] or [turns]
    room = min(max_tokens, max_model_len // 2)
    fitting = (count for count, each in enumerate(kept) if len(prompt_ids((*before, *each))) + room <= max_model_len)
    count = next(fitting, len(kept) - 1)
    return kept[count], count
