"""An item of a conversation: a message, whose parts are texts and images."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trioengine.actors.kept_images import KeptImages
from trioengine.core.errors import RequestRejected
from trioengine.core.image import image_url
from trioengine.serve.byte_budget import size_of
from trioengine.serve.fields import check_fixed, known_fields, shown, text_of
from trioengine.serve.problem import ClientError
from trioengine.serve.realtime.outbox import new_id

MAX_ITEMS = 4096
ITEM_SIZE = 512  # bytes that an item takes in memory, beside its texts
IMAGE_SIZE = 512  # and for an image; its bytes are the engine's
IMAGE = "input_image"
Part: TypeAlias = str | Mapping[str, Any]  # a text, or an image as the engine takes it in messages
MAX_PARTS = 64  # of an item
MAX_ID = 128
ROOT = "root"  # as previous_item_id: at the beginning


class ItemStatus(enum.Enum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class Role(enum.Enum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


_PART_TYPES = {
    Role.SYSTEM: ("input_text",),
    Role.USER: ("input_text", IMAGE),
    Role.ASSISTANT: ("output_text", "text"),
}


_FIXED: Mapping[str, tuple[Any, ...]] = {  # in items that come back; of no effect
    "object": ("realtime.item",),
    "status": tuple(status.value for status in ItemStatus),
}


@dataclass(slots=True)
class Item:
    """A message. An assistant's item that is in progress grows at its only part.

    An image is the client's part until the engine has its bytes, then the engine's: `message` has it in both forms.
    """

    role: Role
    _parts: list[Part]
    id: str = field(default_factory=lambda: new_id("item"))
    status: ItemStatus = ItemStatus.COMPLETED
    _deltas: list[str] = field(default_factory=list)  # what has come since anybody asked for the text
    _kept: KeptImages | None = None  # while it is part of a conversation

    @property
    def parts(self) -> list[Part]:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._parts = ["".join([*self.texts, *deltas])]
        return self._parts

    @property
    def texts(self) -> list[str]:
        """Its parts that are texts: of an assistant's item all."""
        return [part for part in self.parts if isinstance(part, str)]

    def grow(self, delta: str) -> None:
        """There is more of the only part; with the first, also an empty one, there is a part."""
        self._deltas.append(delta)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_images(self) -> bool:
        return any(not isinstance(part, str) for part in self._parts)

    @property
    def is_empty(self) -> bool:
        """Whether it is an answer without text, which is not part of prompts."""
        return self.role is Role.ASSISTANT and not self.text

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return ITEM_SIZE + size_of_parts(self.parts)

    @property
    def message(self) -> dict[str, Any]:
        """As a chat message; its content is a list of parts if it has images."""
        content = [_text_part(part) if isinstance(part, str) else part for part in self.parts]
        return {"role": self.role.value, "content": content if self.has_images else self.text}

    def take_images(self, message: Mapping[str, Any]) -> None:
        """Have the images as in this message, which is its own with the engine's images."""
        if self.has_images:
            self._parts = [part["text"] if part["type"] == "text" else part for part in message["content"]]

    def keep(self) -> None:
        """Keep its images, until `release`."""
        if self.has_images:
            self._kept = KeptImages([self.message])

    def release(self) -> None:
        if self._kept is not None:
            self._kept.release()

    def truncate(self, content_index: int, text_end: int) -> None:
        """Keep so many characters of this part, and nothing of those behind it."""
        texts = self.texts
        is_cut = text_end < len(texts[content_index]) or content_index < len(texts) - 1
        self._parts = [*texts[:content_index], texts[content_index][:text_end]]
        if is_cut:
            self.status = ItemStatus.INCOMPLETE

    def to_json(self) -> dict[str, Any]:
        """As clients see it: an image is a part without its bytes."""
        kind = _PART_TYPES[self.role][0]
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status.value,
            "role": self.role.value,
            "content": [
                {"type": kind, "text": part} if isinstance(part, str) else {"type": IMAGE, "image_url": None}
                for part in self.parts
            ],
        }


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def size_of_parts(parts: Iterable[Part]) -> int:
    """Bytes in memory."""
    return sum(size_of(part) if isinstance(part, str) else IMAGE_SIZE for part in parts)


@dataclass(frozen=True, slots=True)
class ItemReference:
    """An item of the conversation, as a part of a response's input; `where` is its place there."""

    id: Any
    where: str


def parse_item(fields: object, where: str = "item") -> Item:
    """The item of a conversation.item.create. Raises ClientError, naming what we cannot take."""
    item = known_fields(fields, ("id", "object", "type", "status", "role", "content"), where)
    if item.get("type") != "message":
        message = f"{where}.type must be message, got {shown(item.get('type'))}"
        raise ClientError("unsupported_item", message, param=f"{where}.type")
    role = next((role for role in Role if role.value == item.get("role")), None)
    if role is None:
        message = f"{where}.role must be one of {', '.join(role.value for role in Role)}, got {shown(item.get('role'))}"
        raise ClientError("invalid_value", message, param=f"{where}.role")
    check_fixed(item, _FIXED, where)
    content, param = item.get("content"), f"{where}.content"
    if not isinstance(content, list) or not 1 <= len(content) <= MAX_PARTS:
        problem = f"{len(content)} parts" if isinstance(content, list) else shown(content)
        message = f"{param} must be a list of 1 to {MAX_PARTS} parts, got {problem}"
        raise ClientError("invalid_value", message, param=param)
    parts = [_part(part, _PART_TYPES[role], f"{param}[{index}]") for index, part in enumerate(content)]
    id, param = item.get("id"), f"{where}.id"
    if id is None:
        return Item(role, parts)
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID or id == ROOT:
        raise ClientError("invalid_value", f"{param} must be a string of 1 to {MAX_ID} characters", param=param)
    return Item(role, parts, id)


def parse_input(value: object, where: str) -> tuple[Item | ItemReference, ...]:
    """The items that a response is to go on from in place of the conversation. Raises ClientError."""
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise ClientError("invalid_value", f"{where} must be a list of at most {MAX_ITEMS} items", param=where)
    return tuple(_input_item(entry, f"{where}[{index}]") for index, entry in enumerate(value))


def _input_item(entry: object, where: str) -> Item | ItemReference:
    if isinstance(entry, Mapping) and entry.get("type") == "item_reference":
        return ItemReference(known_fields(entry, ("id", "type"), where).get("id"), f"{where}.id")
    return parse_item(entry, where)


def _part(part: object, types: tuple[str, ...], where: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else types[0]
    if kind not in types:
        rule = " or ".join(name for name in types if name != "text")
        message = f"{where}.type must be {rule}, got {shown(kind)}"
        raise ClientError("unsupported_content", message, param=f"{where}.type")
    if kind == IMAGE:
        return _image(part, where)
    return text_of(known_fields(part, ("type", "text"), where).get("text"), f"{where}.text")


def _image(part: object, where: str) -> Part:
    fields = known_fields(part, ("type", "image_url", "detail"), where)
    try:
        image_url(fields, where)
    except RequestRejected as exc:
        raise ClientError(exc.code, exc.message, param=exc.param) from None
    return fields
