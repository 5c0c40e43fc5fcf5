"""The conversation of a session: the committed messages, and the items that hold them at the server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from itertools import chain, count
from typing import NamedTuple

from trioengine.aio.concurrency import Notifier
from trioengine.client.connection import Posts
from trioengine.client.problems import placed
from trioengine.client.prompt import MAX_EVENT, MAX_IMAGE_EVENT, Message, has_images, items_of, rendered
from trioengine.core.errors import EngineError, RequestRejected


class Prepared(NamedTuple):
    """The items of messages: for each message the ids of its items, and by these the events that create them."""

    item_ids: list[tuple[str, ...]]
    events: dict[str, str]


class Conversation:
    """Posts each change in the step in which it is made."""

    def __init__(self, posts: Posts) -> None:
        self.messages: list[Message] = []
        self.posts = posts
        self._item_ids: list[tuple[str, ...]] = []  # of each message
        self._ids = count(1)
        self._unconfirmed: set[str] = set()  # events of the history that was given
        self._refusal: EngineError | None = None  # the server's first, of one of these events
        self._confirmed = Notifier()

    def prepared(self, messages: Sequence[Message]) -> Prepared:
        """The items of these messages. Raises RequestRejected; posts nothing."""
        prepared = Prepared([], {})
        for message in messages:
            items = items_of(message, lambda: f"item_{next(self._ids)}")
            limit = MAX_IMAGE_EVENT if has_images(message) else MAX_EVENT
            prepared.item_ids.append(tuple(item["id"] for item in items))
            for item in items:
                id = item["id"]
                prepared.events[id] = rendered("conversation.item.create", f"create_{id}", {"item": item}, limit)
        return prepared

    def create(self, events: dict[str, str]) -> None:
        """Post prepared events."""
        for id, text in events.items():
            self.posts.put(text, f"create_{id}")

    def delete(self, item_ids: Iterable[str]) -> None:
        """Delete items at the server."""
        for id in item_ids:
            event_id = f"delete_{id}"
            self.posts.put(rendered("conversation.item.delete", event_id, {"item_id": id}), event_id)

    def truncate(self, item_id: str, text_end: int) -> None:
        """Cut a message of an answer at the server to its first `text_end` characters."""
        place = {"item_id": item_id, "content_index": 0, "text_end": text_end}
        self.posts.put(rendered("conversation.item.truncate", f"truncate_{item_id}", place))

    def commit(self, messages: Sequence[Message], item_ids: Sequence[tuple[str, ...]]) -> None:
        """Append messages that the server has as these items, each as some."""
        self.messages += messages
        self._item_ids += item_ids

    def drop(self, item_ids: Collection[str]) -> None:
        """Remove the messages of these items, here and at the server; unknown ids are ignored."""
        dropped = set(item_ids)
        kept = []
        for message, ids in zip(self.messages, self._item_ids, strict=True):
            if dropped.isdisjoint(ids):
                kept.append((message, ids))
            else:
                self.delete(ids)
        self.messages, self._item_ids = [message for message, _ in kept], [ids for _, ids in kept]

    def replace(self, messages: Sequence[Message], prepared: Prepared) -> None:
        """Make these messages, with their prepared items, the whole conversation."""
        self.delete(chain.from_iterable(self._item_ids))
        self.messages, self._item_ids = list(messages), prepared.item_ids
        self._unconfirmed = {f"create_{id}" for id in prepared.events}
        self._refusal = None
        self.create(prepared.events)
        self._confirmed.notify()

    def on_answer(self, event_id: object, error: EngineError | None = None) -> None:
        """Process the server's answer to an event: done, or refused with `error`. Other ids are ignored."""
        self.posts.on_answer(event_id)
        if isinstance(event_id, str) and event_id in self._unconfirmed:
            self._unconfirmed.remove(event_id)
            if error is not None and self._refusal is None:
                self._refusal = self._refusal_of_history(error, event_id.removeprefix("create_"))
            self._confirmed.notify()

    def _refusal_of_history(self, error: EngineError, item_id: str) -> EngineError:
        """The error about this item, with its place in the history."""
        error_with_place = self.with_place(error, item_id)
        if error_with_place is not error or not isinstance(error, RequestRejected):
            return error_with_place
        place = f"history[{index_of(item_id, self._item_ids)}]"
        return RequestRejected(error.code, f"{place}: {error.message}", param=place)

    def with_place(self, error: EngineError, item_id: str) -> EngineError:
        """The server's error about this item, with its place in the history if the item is part of that."""
        index = index_of(item_id, self._item_ids)
        return error if index is None else placed(error, f"history[{index}]", self.messages[index])

    async def confirmed(self) -> None:
        """Wait until the server has the history that was given. Raises its refusal, until the history is replaced."""
        while self._unconfirmed:
            await self._confirmed.wait()
        if self._refusal is not None:
            raise copy(self._refusal)


def index_of(item_id: object, item_ids: Sequence[tuple[str, ...]]) -> int | None:
    """Return the index of the message that has this item; None if no message has it."""
    return next((index for index, ids in enumerate(item_ids) if item_id in ids), None)
