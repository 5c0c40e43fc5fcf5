"""The conversation of a connection: its items, in order. The connection owns them; the engine's session caches them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trioengine.serve.byte_budget import Held
from trioengine.serve.fields import shown
from trioengine.serve.problem import ClientError
from trioengine.serve.realtime.item import (
    ITEM_SIZE,
    MAX_ITEMS,
    ROOT,
    Item,
    ItemReference,
    ItemStatus,
    Role,
    size_of_parts,
)
from trioengine.serve.realtime.outbox import EVENT_FACTOR
from trioengine.text.messages import Turns


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
