"""The events that a client may send, read from the text of a message."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected, TimedOut
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import as_served, known_fields, load_object, shown
from trioengine.serve.realtime.items import Item, ItemReference, parse_input, parse_item

MAX_EVENT_ID = 512


class Conversation(enum.Enum):
    """Which conversation a response belongs to."""

    AUTO = "auto"  # the connection's
    NONE = "none"  # it runs beside it, and leaves nothing in it


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    session: Any


@dataclass(frozen=True, slots=True)
class ItemCreate:
    item: Item
    previous_item_id: Any


@dataclass(frozen=True, slots=True)
class ItemRetrieve:
    item_id: Any


@dataclass(frozen=True, slots=True)
class ItemTruncate:
    item_id: Any
    content_index: Any
    text_end: Any  # characters that stay


@dataclass(frozen=True, slots=True)
class ItemDelete:
    item_id: Any


@dataclass(frozen=True, slots=True)
class ResponseCreate:
    settings: Mapping[str, Any]
    conversation: Conversation = Conversation.AUTO
    input: tuple[Item | ItemReference, ...] | None = None  # in place of the conversation


@dataclass(frozen=True, slots=True)
class ResponseCancel:
    response_id: Any


ClientEvent: TypeAlias = (
    SessionUpdate | ItemCreate | ItemRetrieve | ItemTruncate | ItemDelete | ResponseCreate | ResponseCancel
)

_FIELDS = {  # beside event_id and type
    "session.update": ("session",),
    "conversation.item.create": ("item", "previous_item_id"),
    "conversation.item.retrieve": ("item_id",),
    "conversation.item.truncate": ("item_id", "content_index", "text_end", "audio_end_ms"),
    "conversation.item.delete": ("item_id",),
    "response.create": ("response",),
    "response.cancel": ("response_id",),
}


class EventError(Exception):
    """A message that is no event, or one we cannot act on; `event_id` is the client's, where it has one."""

    def __init__(self, cause: ClientError, event_id: str | None) -> None:
        super().__init__(str(cause))
        self.problem = cause.problem
        self.event_id = event_id


def parse(text: str | bytes) -> tuple[ClientEvent, str | None]:
    """The event in a message, and the client's id of it. Raises EventError."""
    event_id = None
    try:
        fields = _load(text)
        event_id = _event_id(fields)
        return _event(fields), event_id
    except ClientError as exc:
        raise EventError(exc, event_id) from exc


def _load(text: str | bytes) -> Mapping[str, Any]:
    if isinstance(text, bytes):
        raise ClientError("invalid_event", "events are text messages, this one is binary")
    return load_object(text, "the message", "invalid_event")


def _event_id(fields: Mapping[str, Any]) -> str | None:
    event_id = fields.get("event_id")
    if event_id is not None and (not isinstance(event_id, str) or len(event_id) > MAX_EVENT_ID):
        raise ClientError(
            "invalid_value", f"event_id must be a string of up to {MAX_EVENT_ID} characters", param="event_id"
        )
    return event_id


def _event(fields: Mapping[str, Any]) -> ClientEvent:
    name = fields.get("type")
    names = _FIELDS.get(name) if isinstance(name, str) else None
    if names is None:
        known = ", ".join(_FIELDS)
        fault = "type is missing; it must be" if name is None else "type must be"
        given = "" if name is None else f", got {shown(name)}"
        raise ClientError("unknown_event", f"{fault} one of {known}{given}", param="type")
    known_fields(fields, ("event_id", "type", *names))
    match name:
        case "session.update":
            return SessionUpdate(_required(fields, "session"))
        case "conversation.item.create":
            return ItemCreate(parse_item(_required(fields, "item")), fields.get("previous_item_id"))
        case "conversation.item.retrieve":
            return ItemRetrieve(_required(fields, "item_id"))
        case "conversation.item.truncate":
            return _item_truncate(fields)
        case "conversation.item.delete":
            return ItemDelete(_required(fields, "item_id"))
        case "response.create":
            return _response_create(fields.get("response"))
        case _:
            return ResponseCancel(fields.get("response_id"))


def _item_truncate(fields: Mapping[str, Any]) -> ItemTruncate:
    if fields.get("audio_end_ms") is not None:
        message = "audio_end_ms: there is no audio; text_end says how many characters stay"
        raise ClientError("unsupported_parameter", message, param="audio_end_ms")
    names = ("item_id", "content_index", "text_end")
    return ItemTruncate(*(_required(fields, name) for name in names))


def _response_create(response: object) -> ResponseCreate:
    """What does not concern the conversation is left for the settings."""
    if response is None:
        return ResponseCreate({})
    if not isinstance(response, dict):
        raise ClientError("invalid_type", "response must be an object", param="response")
    settings = {name: value for name, value in response.items() if name not in ("conversation", "input")}
    named, given = response.get("conversation"), response.get("input")
    named = Conversation.AUTO.value if named is None else named
    conversation = next((known for known in Conversation if known.value == named), None)
    if conversation is None:
        param = "response.conversation"
        message = f'{param} must be "auto" or "none", got {shown(named)}'
        raise ClientError("unsupported_parameter", message, param=param)
    return ResponseCreate(settings, conversation, None if given is None else parse_input(given, "response.input"))


def _required(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    if value is None:
        raise ClientError("missing_parameter", f"{name} is missing", param=name)
    return value


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
