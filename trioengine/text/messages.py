"""Chat messages: their types and checks, and the turns of a chat.

A turn is a user message and all messages after it, up to the next user message. System and developer messages at the
beginning belong to no turn; other messages before the first user message are a turn of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, TypedDict, get_args

from trioengine.core.checks import BYTES, check_json, check_role, check_unicode, content_of
from trioengine.core.errors import RequestRejected
from trioengine.core.image import is_image_part
from trioengine.core.wording import brief

Message: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(TypedDict):
    """A chat message, for type checkers. Messages may have more keys than these; the template gets all of them."""

    role: Role
    content: str | list[dict[str, Any]]


ROLES: tuple[str, ...] = get_args(Role)
IMAGE_PART = {"type": "image"}  # an image's part as templates see it
_IMAGE_TYPES = ("image", "image_url", "input_image")
_LEADING = ("system", "developer")


def text_part(text: str) -> dict[str, str]:
    """Return a text as one part of a content."""
    return {"type": "text", "text": text}


@dataclass(frozen=True, slots=True)
class Turns:
    """The messages of a chat, and the indices at which its turns begin."""

    messages: tuple[Message, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Self:
        """Divide messages, checked or not, into turns."""
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        first = next((index for index, role in enumerate(roles) if role not in _LEADING), len(roles))
        starts = [index for index, role in enumerate(roles) if index == first or (index > first and role == "user")]
        return cls(tuple(messages), tuple(starts))

    @property
    def max_dropped(self) -> int:
        """How many turns can be dropped: all but the newest."""
        return max(len(self.starts) - 1, 0)

    def dropped(self, count: int) -> range:
        """Return the indices of the messages of the oldest `count` turns."""
        return range(self.starts[0], self.starts[count]) if count else range(0)

    def without(self, count: int) -> tuple[Message, ...]:
        """Return the messages without the oldest `count` turns."""
        dropped = self.dropped(count)
        return self.messages[: dropped.start] + self.messages[dropped.stop :] if dropped else self.messages

    @property
    def newest(self) -> tuple[Message, ...]:
        """The messages that are never dropped."""
        return self.without(self.max_dropped)


# ---- checks -------------------------------------------------------------------------------------------------------


def checked_messages(messages: Sequence[Message], name: str, *, image_refusal: str) -> tuple[Message, ...]:
    """Return copies, in which each content is a string, or a list of parts if it has images.

    Raises RequestRejected, naming the place, for a malformed message, and for an image if `image_refusal` is not empty.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestRejected("invalid_value", f"{name} must be a list of messages", param=name)
    return tuple(_checked_message(message, f"{name}[{index}]", image_refusal) for index, message in enumerate(messages))


def copied(value: Any) -> Any:
    """Return a deep copy of checked messages or a part of them; images are shared, not copied."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, Sequence) else value


def _checked_message(message: Message, name: str, image_refusal: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestRejected("invalid_value", f"{name} must be a message, got {type(message).__name__}", param=name)
    check_role(name, message, ROLES)
    content = content_of(name, message)
    fields: dict[str, Any] = {**message, "content": None}
    check_json(fields, name)
    return {**copied(fields), "content": _content(content, f"{name}.content", image_refusal)}


def _content(content: object, name: str, image_refusal: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        check_unicode(content, name)
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
        check_unicode(text, f"{name}.text")
        return text_part(text)
    if image_refusal and fields.get("type") in _IMAGE_TYPES:
        raise RequestRejected("images_not_supported", f"{name}: {image_refusal}", param=name)
    if is_image_part(part):
        image_part: dict[str, Any] = fields["image"].part
        return image_part
    accepted = "a text part" if image_refusal else "a text part, or an image part with an Image"
    raise RequestRejected("invalid_value", f"{name} must be {accepted}", param=name)
