"""The conversation of a session: what was committed, and the items by which the server knows it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from copy import copy

from trioengine.aio.nursery import Notifier
from trioengine.client.connection import Posts
from trioengine.client.problems import placed
from trioengine.client.prompt import MAX_EVENT, MAX_IMAGE_EVENT, Message, has_images, item_of, rendered
from trioengine.core.errors import EngineError, RequestRejected


class Conversation:
    """Each change is posted in the step in which it is made."""

    def __init__(self, posts: Posts) -> None:
        self.messages: list[Message] = []
        self._item_ids: list[str] = []  # of these
        self._posts = posts
        self._ids = itertools.count(1)
        self._unconfirmed: set[str] = set()  # events of the history that was given
        self._refusal: EngineError | None = None  # the server's, of one of these
        self._changes = Notifier()  # of these two

    def prepared(self, messages: Sequence[Message]) -> dict[str, str]:
        """The events that make items of these messages, by the items' ids. Raises RequestRejected; posts nothing."""
        ids = [f"item_{next(self._ids)}" for _ in messages]
        return {
            id: rendered(
                "conversation.item.create",
                f"create_{id}",
                {"item": item_of(message, id)},
                MAX_IMAGE_EVENT if has_images(message) else MAX_EVENT,
            )
            for id, message in zip(ids, messages, strict=True)
        }

    def create(self, events: dict[str, str]) -> None:
        """Post what was prepared."""
        for id, text in events.items():
            self._posts.put(text, f"create_{id}")

    def delete(self, item_ids: Sequence[str]) -> None:
        for id in item_ids:
            event_id = f"delete_{id}"
            self._posts.put(rendered("conversation.item.delete", event_id, {"item_id": id}), event_id)

    def truncate(self, item_id: str, text_end: int) -> None:
        """Cut an answer that is longer at the server than here."""
        place = {"item_id": item_id, "content_index": 0, "text_end": text_end}
        self._posts.put(rendered("conversation.item.truncate", f"truncate_{item_id}", place))

    def commit(self, messages: Sequence[Message], item_ids: Sequence[str]) -> None:
        """These are part of it from now on."""
        self.messages += messages
        self._item_ids += item_ids

    def drop(self, item_ids: Collection[str]) -> None:
        """Take these messages out of it; others are ignored."""
        dropped = set(item_ids)
        kept = [(message, id) for message, id in zip(self.messages, self._item_ids, strict=True) if id not in dropped]
        self.delete([id for id in self._item_ids if id in dropped])
        self.messages, self._item_ids = [message for message, _ in kept], [id for _, id in kept]

    def replace(self, messages: Sequence[Message], events: dict[str, str]) -> None:
        """These messages, whose events were prepared, are all of it."""
        self.delete(self._item_ids)
        self.messages, self._item_ids = list(messages), list(events)
        self._unconfirmed = {f"create_{id}" for id in events}
        self._refusal = None
        self.create(events)
        self._changes.notify()

    def answered(self, event_id: object, error: EngineError | None = None) -> None:
        """The server has done what this event asks for, or refuses it."""
        self._posts.answered(event_id)
        if isinstance(event_id, str) and event_id in self._unconfirmed:
            self._unconfirmed.remove(event_id)
            self._refusal = self._refusal or (error and self._of_history(error, event_id.removeprefix("create_")))
            self._changes.notify()

    def _of_history(self, error: EngineError, item_id: str) -> EngineError:
        """An error about this item, with the place in the history."""
        renamed = self.named(error, item_id)
        if renamed is not error or not isinstance(error, RequestRejected):
            return renamed
        place = f"history[{self._item_ids.index(item_id)}]"
        return RequestRejected(error.code, f"{place}: {error.message}", param=place)

    def named(self, error: EngineError, item_id: str) -> EngineError:
        """The server's error about this item; if it is one of the conversation's, with the place in the history."""
        if item_id not in self._item_ids:
            return error
        index = self._item_ids.index(item_id)
        return placed(error, f"history[{index}]", self.messages[index])

    async def confirmed(self) -> None:
        """Wait until the server has the history that it was given. Raises why it refuses it, until it is replaced."""
        while self._unconfirmed:
            await self._changes.wait()
        if self._refusal is not None:
            raise copy(self._refusal)
