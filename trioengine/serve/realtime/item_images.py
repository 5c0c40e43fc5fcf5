"""The images of items on their way into the engine, and the names that its errors have for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected, TimedOut
from trioengine.serve.fields import as_served
from trioengine.serve.realtime.client_events import ClientEvent, ItemCreate, ResponseCreate
from trioengine.serve.realtime.item import Item, ItemReference

TIMEOUT = 10.0  # seconds that an event waits for room; those behind it wait, too
_PLACE = re.compile(r"(history|prompt)\[(\d+)\]\.")  # at the beginning of an error's message


async def keep_images(engine: Engine, event: ClientEvent, model: str) -> AbstractContextManager[object]:
    """Give the images of an event to the engine, and the items the engine's; within, they are kept.

    Raises EngineError, which names the part, and the model as it is served. Cancelled, nothing is kept.
    """
    entries, where = _entries(event)
    if not any(isinstance(entry, Item) and entry.has_images for entry in entries):
        return nullcontext()
    messages: list[Any] = [entry.message if isinstance(entry, Item) else None for entry in entries]
    try:
        kept = await engine.keep_images(messages, where=where, timeout=TIMEOUT)
    except TimedOut as exc:
        raise EngineOverloaded(str(exc), code="payloads", is_full=True) from None
    except RequestRejected as exc:
        message = as_served(exc.message, engine.config.model, model)
        raise RequestRejected(exc.code, _of_event(message), param=_of_event(exc.param or "")) from None
    for entry, taken in zip(entries, kept.messages, strict=True):
        if isinstance(entry, Item):
            entry.take_images(taken)
    return kept


def _entries(event: ClientEvent) -> tuple[Sequence[Item | ItemReference], str]:
    """The items in an event, and where they are."""
    if isinstance(event, ItemCreate):
        return (event.item,), "item"
    return (event.input or () if isinstance(event, ResponseCreate) else ()), "response.input"


def _of_event(place: str) -> str:
    """The only item of a conversation.item.create has no index."""
    return place.replace("item[0].", "item.", 1) if place.startswith("item[0].") else place


def naming_item(error: RequestRejected, item_ids: Sequence[str | None], num_history: int) -> RequestRejected:
    """The error, if it is about a part of a message, with the id of the item that the message is.

    `item_ids` are those of the messages, of which the first `num_history` were the session's history.
    """
    place = _PLACE.match(error.message)
    if place is None:
        return error
    index = int(place[2]) + (num_history if place[1] == "prompt" else 0)
    item_id = item_ids[index] if index < len(item_ids) else None
    if item_id is None:
        return error
    return RequestRejected(error.code, f"item {item_id!r}: {error.message[place.end() :]}", param=item_id)
