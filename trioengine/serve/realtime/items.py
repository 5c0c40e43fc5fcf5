"""The conversation of a connection: its items in their order.

The connection owns the items; the history of the engine's session is a cache of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trioengine.serve.errors import ClientError
from trioengine.serve.limits import Held
from trioengine.serve.parsing import shown
from trioengine.serve.realtime.item import Item, ItemStatus, MessageItem, Role
from trioengine.serve.realtime.outbox import EVENT_FACTOR
from trioengine.serve.realtime.requests import MAX_ITEMS, ItemReference

ROOT = "root"  # a previous_item_id: insert at the beginning


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
        if not (isinstance(item, MessageItem) and item.role is Role.ASSISTANT):
            message = f"item_id: {item.id!r} is not a message of the assistant, and only those are truncated"
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


def _check_position(value: int, most: int, param: str) -> None:
    if value > most:
        message = f"{param} must be an integer from 0 to {most}, got {shown(value)}"
        raise ClientError("invalid_value", message, param=param)
