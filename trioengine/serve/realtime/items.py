"""The conversation of a connection: its items, each a message of texts and images, in their order.

The connection owns the items; the history of the engine's session is a cache of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trioengine.actors.images import KeptImages
from trioengine.serve.errors import ClientError
from trioengine.serve.ids import new_id
from trioengine.serve.limits import Held, size_of
from trioengine.serve.parsing import shown
from trioengine.serve.realtime.outbox import EVENT_FACTOR
from trioengine.serve.realtime.requests import MAX_ITEMS, ItemReference
from trioengine.text.messages import Turns

ITEM_SIZE = 512  # bytes of memory of an item, beside its texts
IMAGE_SIZE = 512  # bytes of memory of an image, whose data the engine keeps
IMAGE = "input_image"
Part: TypeAlias = str | Mapping[str, Any]  # a text, or an image in the engine's form
ROOT = "root"  # a previous_item_id: insert at the beginning


class ItemStatus(enum.Enum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"


class Role(enum.Enum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


PART_TYPES = {
    Role.SYSTEM: ("input_text",),
    Role.USER: ("input_text", IMAGE),
    Role.ASSISTANT: ("output_text", "text"),
}


@dataclass(slots=True)
class Item:
    """A message. The only part of an assistant's item grows while the item is in progress.

    An image is the client's part until the engine keeps its bytes, then the engine's; `message` holds either form.
    """

    role: Role
    _parts: list[Part]
    id: str = field(default_factory=lambda: new_id("item_"))
    status: ItemStatus = ItemStatus.COMPLETED
    _deltas: list[str] = field(default_factory=list)  # received since the text was last joined
    _kept: KeptImages | None = None  # while it is in a conversation

    @property
    def parts(self) -> list[Part]:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._parts = ["".join([*self.texts, *deltas])]
        return self._parts

    @property
    def texts(self) -> list[str]:
        """The parts that are texts; all parts of an assistant's item are."""
        return [part for part in self.parts if isinstance(part, str)]

    def grow(self, delta: str) -> None:
        """Append to the only part; the first delta, even an empty one, creates it."""
        self._deltas.append(delta)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def has_images(self) -> bool:
        return any(not isinstance(part, str) for part in self._parts)

    @property
    def is_empty(self) -> bool:
        """Whether it is an assistant's item without text, which prompts leave out."""
        return self.role is Role.ASSISTANT and not self.text

    @property
    def size(self) -> int:
        """Return the bytes of memory."""
        return ITEM_SIZE + size_of_parts(self.parts)

    @property
    def message(self) -> dict[str, Any]:
        """The item as a chat message, whose content is a list of parts if it has images."""
        content = [_text_part(part) if isinstance(part, str) else part for part in self.parts]
        return {"role": self.role.value, "content": content if self.has_images else self.text}

    def take_images(self, message: Mapping[str, Any]) -> None:
        """Replace the images by the images of `message`, which is this message in the engine's form."""
        if self.has_images:
            self._parts = [part["text"] if part["type"] == "text" else part for part in message["content"]]

    def keep(self) -> None:
        """Keep the images in the engine until `release`."""
        if self.has_images:
            self._kept = KeptImages([self.message])

    def release(self) -> None:
        if self._kept is not None:
            self._kept.release()

    def truncate(self, content_index: int, text_end: int) -> None:
        """Keep the first `text_end` characters of this part, and drop all later parts."""
        texts = self.texts
        is_cut = text_end < len(texts[content_index]) or content_index < len(texts) - 1
        self._parts = [*texts[:content_index], texts[content_index][:text_end]]
        if is_cut:
            self.status = ItemStatus.INCOMPLETE

    def to_json(self) -> dict[str, Any]:
        """Return the item as clients see it: images without their bytes."""
        kind = PART_TYPES[self.role][0]
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
    """Return the bytes of memory."""
    return sum(size_of(part) if isinstance(part, str) else IMAGE_SIZE for part in parts)


class Items:
    """The items of one conversation, in order. `held` accounts for their bytes; images are kept until `close`."""

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
        """Iterate over the items that are not in progress."""
        items = (self._items[id] for id in self._order)
        return (item for item in items if item.status is not ItemStatus.IN_PROGRESS)

    @property
    def left_out(self) -> tuple[Item, ...]:
        """The items that all further prompts leave out."""
        return tuple(item for item in self if item.id in self._left_out)

    def leave_out(self, ids: Iterable[str]) -> None:
        """Leave these items out of all further prompts; some may be deleted already."""
        self._left_out.update(id for id in ids if id in self._items)

    def get(self, id: str, param: str) -> Item:
        """Return an item by its id. Raises ClientError."""
        item = self._items.get(id)
        if item is None:
            raise ClientError("item_not_found", f"{param}: item {shown(id)} not found", param=param)
        return item

    def add(self, item: Item, previous: str | None = None) -> str | None:
        """Insert an item after the one with the id `previous`, or at the end; returns the id of the item before it.

        Raises ClientError; OverBudget if the item and the events about it exceed the budget.
        """
        if item.id in self._items:
            raise ClientError("duplicate_item", f"item.id: item {item.id!r} already exists", param="item.id")
        self.check_room(item.size, "item")
        self._held.check_room(item.size + 2 * EVENT_FACTOR * item.size)
        index = self._index_after(previous)
        return self._insert(item, index)

    def check_room(self, size: int, param: str | None) -> None:
        """Raise ClientError if an item of `size` bytes exceeds the limits of a conversation."""
        if len(self) >= MAX_ITEMS or self._size + size > self._max_size:
            limit = f"{MAX_ITEMS} items or {self._max_size} bytes (--max-conversation-size)"
            message = f"the conversation is full: it may have {limit}"
            raise ClientError("conversation_too_large", message, param=param)

    def append_answer(self, item: Item) -> str | None:
        """Append an item of the model; room was checked with the request. Returns the id of the item before it."""
        return self._insert(item, len(self))

    def finish_answer(self, item: Item) -> None:
        """Account for an item of the model, which is complete now."""
        self._count(item.size)

    def delete(self, id: str) -> str:
        """Remove an item that is not in progress; returns its id. Raises ClientError."""
        item = self._finished_item(id)
        del self._items[item.id]
        self._order.remove(item.id)
        self._left_out.discard(item.id)
        self._count(-item.size)
        item.release()
        return item.id

    def truncate(self, id: str, content_index: int, text_end: int) -> Item:
        """Keep the first `text_end` characters of an assistant's item; returns the item. Raises ClientError."""
        item = self._finished_item(id)
        if item.role is not Role.ASSISTANT:
            message = f"item_id: {item.id!r} is not the assistant's, and only those are truncated"
            raise ClientError("invalid_value", message, param="item_id")
        _check_position(content_index, len(item.texts) - 1, "content_index")
        _check_position(text_end, len(item.texts[content_index]), "text_end")
        size = item.size
        item.truncate(content_index, text_end)
        self._count(item.size - size)
        return item

    def close(self) -> None:
        """Release all images."""
        for item in self._items.values():
            item.release()

    def resolve(self, entries: Iterable[Item | ItemReference]) -> list[Item]:
        """Replace each reference in a response's input by its item. Raises ClientError."""
        items = [
            self.get(entry.id, f"response.input[{index}].id") if isinstance(entry, ItemReference) else entry
            for index, entry in enumerate(entries)
        ]
        if sum(item.size for item in items) > self._max_size:  # an item may be referenced many times
            param = "response.input"
            message = f"{param} has more than {self._max_size} bytes (--max-conversation-size)"
            raise ClientError("conversation_too_large", message, param=param)
        return items

    def before(self, item: Item) -> str | None:
        """Return the id of the item before this one."""
        index = self._order.index(item.id)
        return self._order[index - 1] if index else None

    def _count(self, size: int) -> None:
        self._size += size
        self._held.charge(size)

    def _finished_item(self, id: str) -> Item:
        item = self.get(id, "item_id")
        if item.status is ItemStatus.IN_PROGRESS:
            raise ClientError("item_in_progress", f"item_id: {item.id!r} is being generated", param="item_id")
        return item

    def _index_after(self, previous: str | None) -> int:
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


def chat_messages(items: Iterable[Item], instructions: str) -> tuple[list[dict[str, Any]], list[str | None]]:
    """Return instructions and items, without empty ones, as chat messages, and the item ids (None: instructions)."""
    shown = [item for item in items if not item.is_empty]
    messages = [item.message for item in shown]
    ids: list[str | None] = [item.id for item in shown]
    return ([{"role": "system", "content": instructions}, *messages], [None, *ids]) if instructions else (messages, ids)


def num_turns(items: Iterable[Item]) -> int:
    """Return the number of turns in these items."""
    return len(Turns.of(chat_messages(items, "")[0]).starts)


def size_of_messages(messages: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes of memory of a response's messages."""
    return sum(ITEM_SIZE + _size_of_content(message["content"]) for message in messages)


def _size_of_content(content: str | list[Mapping[str, Any]]) -> int:
    return size_of_parts([content] if isinstance(content, str) else [part.get("text", part) for part in content])


def _check_position(value: int, most: int, param: str) -> None:
    if value > most:
        message = f"{param} must be an integer from 0 to {most}, got {shown(value)}"
        raise ClientError("invalid_value", message, param=param)
