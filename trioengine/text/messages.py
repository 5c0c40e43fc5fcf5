"""Chat messages: their types, their checks, and the turns of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypedDict, get_args

from trioengine.core.arguments import check_content, check_role
from trioengine.core.bounds import brief
from trioengine.core.errors import RequestRejected
from trioengine.core.image import is_image_part
from trioengine.text.chat_template import text_part

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(TypedDict):
    """A chat message, for programs that want their messages checked; other keys are given to the template as well."""

    role: Role
    content: str | list[dict[str, Any]]


ROLES: tuple[str, ...] = get_args(Role)
BYTES = (bytes, bytearray, memoryview)  # sequences, but of no use here
MAX_DEPTH = 64  # of what a message holds
_IMAGE_TYPES = ("image", "image_url", "input_image")


def checked_messages(messages: Sequence[Message], name: str, *, image_refusal: str) -> tuple[Message, ...]:
    """Copies, each content one string, or a list of parts if it has images.

    Raises RequestRejected, naming the place, for bad messages, and for images if there is an `image_refusal`.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestRejected("invalid_value", f"{name} must be a list of messages", param=name)
    return tuple(_message(message, f"{name}[{index}]", image_refusal) for index, message in enumerate(messages))


def copied(value: Any) -> Any:
    """A copy of what was checked; images are the same ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, Sequence) else value


def _message(message: Message, name: str, image_refusal: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestRejected("invalid_value", f"{name} must be a message, got {type(message).__name__}", param=name)
    check_role(name, message, ROLES)
    check_content(name, message)
    fields: dict[str, Any] = {**message, "content": None}
    _check(fields, name)
    return {**copied(fields), "content": _content(message["content"], f"{name}.content", image_refusal)}


def _check(value: object, name: str, depth: int = 0) -> None:
    """Refuse what JSON cannot say: no template can be relied on to print it."""
    if depth > MAX_DEPTH:
        raise RequestRejected("invalid_value", f"{name} is nested too deeply", param=name)
    if isinstance(value, str):
        _check_unicode(value, name)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise RequestRejected("invalid_value", f"{name} has a key that is no string: {key!r:.60}", param=name)
            _check_unicode(key, name)
            _check(entry, f"{name}.{key:.40}", depth + 1)
    elif isinstance(value, Sequence) and not isinstance(value, BYTES):
        for index, entry in enumerate(value):
            _check(entry, f"{name}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise RequestRejected("invalid_value", f"{name} is no JSON value, but {type(value).__name__}", param=name)


def _check_unicode(text: str, name: str) -> None:
    """JSON can carry lone surrogates, which are no text: no tokenizer takes them."""
    if text.isascii():  # known without looking through it
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{name} is no valid Unicode: it has a lone surrogate"
        raise RequestRejected("invalid_value", message, param=name) from None


def _content(content: object, name: str, image_refusal: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        _check_unicode(content, name)
        return content
    if isinstance(content, BYTES) or not isinstance(content, Sequence):
        problem = f"must be a string or a list of parts, got {brief(content)}"
        raise RequestRejected("invalid_value", f"{name} {problem}", param=name)
    parts = [_part(part, f"{name}[{index}]", image_refusal) for index, part in enumerate(content)]
    return parts if any(map(is_image_part, parts)) else "".join([part["text"] for part in parts])


def _part(part: object, name: str, image_refusal: str) -> dict[str, Any]:
    fields = part if isinstance(part, Mapping) else {}
    text = fields.get("text")
    if fields.get("type") == "text" and isinstance(text, str):
        _check_unicode(text, f"{name}.text")
        return text_part(text)
    _check_image(part, name, image_refusal)
    if is_image_part(part):
        image_part: dict[str, Any] = fields["image"].part
        return image_part
    accepted = "a text part" if image_refusal else "a text part, or an image part with an Image"
    raise RequestRejected("invalid_value", f"{name} must be {accepted}", param=name)


def _check_image(part: object, name: str, image_refusal: str) -> None:
    if image_refusal and isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES:
        raise RequestRejected("images_not_supported", f"{name}: {image_refusal}", param=name)


Message: TypeAlias = Mapping[str, Any]

_LEADING = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Turns:
    """The messages of a chat, and the indices at which their turns begin."""

    messages: tuple[Message, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Self:
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        first = next((index for index, role in enumerate(roles) if role not in _LEADING), len(roles))
        starts = [index for index, role in enumerate(roles) if index == first or (index > first and role == "user")]
        return cls(tuple(messages), tuple(starts))

    @property
    def most(self) -> int:
        """How many turns can be dropped: all but the newest."""
        return max(len(self.starts) - 1, 0)

    def dropped(self, count: int) -> range:
        """The indices of the messages of the oldest `count` turns."""
        return range(self.starts[0], self.starts[count]) if count else range(0)

    def without(self, count: int) -> tuple[Message, ...]:
        """The messages without the oldest `count` turns."""
        dropped = self.dropped(count)
        return self.messages[: dropped.start] + self.messages[dropped.stop :] if dropped else self.messages

    @property
    def newest(self) -> tuple[Message, ...]:
        """The messages that are never dropped."""
        return self.without(self.most)
