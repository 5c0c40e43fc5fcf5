"""An item of a conversation: a message, whose parts are texts and images."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trioengine.actors.images import KeptImages
from trioengine.core.errors import RequestRejected
from trioengine.core.image import image_url
from trioengine.serve.errors import ClientError
from trioengine.serve.limits import Held, size_of
from trioengine.serve.parsing import check_fixed, known_fields, shown, text_of
from trioengine.serve.realtime.outbox import EVENT_FACTOR, new_id
from trioengine.text.messages import Turns

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


def chat_messages(items: Iterable[Item], instructions: str) -> tuple[list[dict[str, Any]], list[str | None]]:
    """Items as chat messages, after the instructions, and the items' ids; an empty answer is left out."""
    shown = [item for item in items if not item.is_empty]
    messages = [item.message for item in shown]
    ids: list[str | None] = [item.id for item in shown]
    return ([{"role": "system", "content": instructions}, *messages], [None, *ids]) if instructions else (messages, ids)


def num_turns(items: Iterable[Item]) -> int:
    """How many turns these items are."""
    return len(Turns.of(chat_messages(items, "")[0]).starts)


def size_of_messages(messages: Iterable[Mapping[str, Any]]) -> int:
    """The bytes in memory of the messages that a response goes on from."""
    return sum(ITEM_SIZE + _size_of_content(message["content"]) for message in messages)


def _size_of_content(content: str | list[Mapping[str, Any]]) -> int:
    return size_of_parts([content] if isinstance(content, str) else [part.get("text", part) for part in content])


class Items:
    """The items, by id and in order. Their bytes are taken of `held`; their images are kept until `close`."""

    def __init__(self, max_size: int, held: Held) -> None:
        self._max_size = max_size
        self._held = held
        self._items: dict[str, Item] = {}
        self._order: list[str] = []
        self._left_out: set[str] = set()
        self._size = 0  # bytes, of finished items

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Item]:
        """Those that are not in progress."""
        items = (self._items[id] for id in self._order)
        return (item for item in items if item.status is not ItemStatus.IN_PROGRESS)

    @property
    def left_out(self) -> tuple[Item, ...]:
        """Those that the prompts of responses leave out for good."""
        return tuple(item for item in self if item.id in self._left_out)

    def leave_out(self, ids: Iterable[str]) -> None:
        """Leave these out from now on; some may be deleted already."""
        self._left_out.update(id for id in ids if id in self._items)

    def get(self, id: object, param: str) -> Item:
        """The item of this id. Raises ClientError."""
        item = self._items.get(id) if isinstance(id, str) else None
        if item is None:
            raise ClientError("item_not_found", f"{param}: item {shown(id)} not found", param=param)
        return item

    def add(self, item: Item, previous: object = None) -> str | None:
        """Insert after the item of the id `previous`; None: at the end. Returns the id of the item before it.

        Raises ClientError: OverBudget, where there is no room for the item and the events that are about it.
        """
        if item.id in self._items:
            raise ClientError("duplicate_item", f"item.id: there is an item {item.id!r} already", param="item.id")
        self.check_room(item.size, "item")
        self._held.check_room(item.size + 2 * EVENT_FACTOR * item.size)
        index = self._index_after(previous)
        return self._insert(item, index)

    def check_room(self, size: int, param: str | None) -> None:
        """Raises ClientError if an item of so many bytes is too much."""
        if len(self) >= MAX_ITEMS or self._size + size > self._max_size:
            limit = f"{MAX_ITEMS} items or {self._max_size} bytes (--max-conversation-size)"
            message = f"the conversation is full: it may have {limit}"
            raise ClientError("conversation_too_large", message, param=param)

    def append_answer(self, item: Item) -> str | None:
        """An item of the model's own; there was room for it when it was asked for. Returns the id before it."""
        return self._insert(item, len(self))

    def finish_answer(self, item: Item) -> None:
        """The model's item is as it will stay."""
        self._count(item.size)

    def delete(self, id: object) -> str:
        """Remove an item that is not in progress, and return its id. Raises ClientError."""
        item = self._at_rest(id)
        del self._items[item.id]
        self._order.remove(item.id)
        self._left_out.discard(item.id)
        self._count(-item.size)
        item.release()
        return item.id

    def truncate(self, id: object, content_index: object, text_end: object) -> Item:
        """Keep so many characters of an assistant's item, which is returned. Raises ClientError."""
        item = self._at_rest(id)
        if item.role is not Role.ASSISTANT:
            message = f"item_id: {item.id!r} is not the assistant's, and only those are truncated"
            raise ClientError("invalid_value", message, param="item_id")
        index = _integer(content_index, len(item.texts) - 1, "content_index")
        size = item.size
        item.truncate(index, _integer(text_end, len(item.texts[index]), "text_end"))
        self._count(item.size - size)
        return item

    def close(self) -> None:
        """The conversation is over."""
        for item in self._items.values():
            item.release()

    def resolve(self, entries: Iterable[Item | ItemReference]) -> list[Item]:
        """A response's input, each reference replaced by the item that it means. Raises ClientError."""
        items = [self.get(entry.id, entry.where) if isinstance(entry, ItemReference) else entry for entry in entries]
        if sum(item.size for item in items) > self._max_size:  # an item may be meant many times
            param = "response.input"
            message = f"{param} has more than {self._max_size} bytes (--max-conversation-size)"
            raise ClientError("conversation_too_large", message, param=param)
        return items

    def before(self, item: Item) -> str | None:
        """The id of the item before this one."""
        index = self._order.index(item.id)
        return self._order[index - 1] if index else None

    def _count(self, size: int) -> None:
        self._size += size
        self._held.charge(size)

    def _at_rest(self, id: object) -> Item:
        item = self.get(id, "item_id")
        if item.status is ItemStatus.IN_PROGRESS:
            raise ClientError("item_in_progress", f"item_id: {item.id!r} is being generated", param="item_id")
        return item

    def _index_after(self, previous: object) -> int:
        if previous is None:
            return len(self)
        return 0 if previous == ROOT else self._order.index(self.get(previous, "previous_item_id").id) + 1

    def _insert(self, item: Item, index: int) -> str | None:
        item.keep()
        self._items[item.id] = item
        self._order.insert(index, item.id)
        if item.status is not ItemStatus.IN_PROGRESS:
            self._count(item.size)
        return self._order[index - 1] if index else None


def _integer(value: object, most: int, param: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ClientError(
            "invalid_value", f"{param} must be an integer from 0 to {most}, got {shown(value)}", param=param
        )
    return value
