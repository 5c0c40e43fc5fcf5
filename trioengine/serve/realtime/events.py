"""The events that clients send: parsing of messages and of the items in them, and their images."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected, TimedOut
from trioengine.core.image import image_url
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import as_served, check_fixed, known_fields, load_object, shown, text_of
from trioengine.serve.realtime.items import (
    IMAGE,
    MAX_ITEMS,
    PART_TYPES,
    ROOT,
    Item,
    ItemReference,
    ItemStatus,
    Part,
    Role,
)

IMAGE_TIMEOUT = 10.0  # seconds that an event, and all behind it, wait for room for its images
MAX_EVENT_ID = 512  # characters
MAX_ITEM_ID = 128  # characters
MAX_PARTS = 64  # of an item


class Conversation(enum.Enum):
    """The conversation that a response belongs to."""

    AUTO = "auto"  # that of the connection
    NONE = "none"  # out of band: it leaves nothing in the conversation


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
    text_end: Any  # characters to keep


@dataclass(frozen=True, slots=True)
class ItemDelete:
    item_id: Any


@dataclass(frozen=True, slots=True)
class ResponseCreate:
    settings: Mapping[str, Any]
    conversation: Conversation = Conversation.AUTO
    input: tuple[Item | ItemReference, ...] | None = None  # replaces the conversation


@dataclass(frozen=True, slots=True)
class ResponseCancel:
    response_id: Any


ClientEvent: TypeAlias = (
    SessionUpdate | ItemCreate | ItemRetrieve | ItemTruncate | ItemDelete | ResponseCreate | ResponseCancel
)

_ITEM_FIXED: Mapping[str, tuple[Any, ...]] = {  # of items that clients send back; without effect
    "object": ("realtime.item",),
    "status": tuple(status.value for status in ItemStatus),
}
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
    """A message is not an event that the server accepts; `event_id` is the client's, if any."""

    def __init__(self, cause: ClientError, event_id: str | None) -> None:
        super().__init__(str(cause))
        self.problem = cause.problem
        self.event_id = event_id


def parse(text: str | bytes) -> tuple[ClientEvent, str | None]:
    """Parse a message into its event and the client's id of it. Raises EventError."""
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
        message = "audio_end_ms: audio is not supported; text_end is the number of characters to keep"
        raise ClientError("unsupported_parameter", message, param="audio_end_ms")
    names = ("item_id", "content_index", "text_end")
    return ItemTruncate(*(_required(fields, name) for name in names))


def _response_create(response: object) -> ResponseCreate:
    """Parse `conversation` and `input`; the other fields are settings, which Settings checks."""
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


async def keep_images(engine: Engine, event: ClientEvent, model: str) -> AbstractContextManager[object]:
    """Hand the images of an event to the engine, which keeps them within the block, and take its form of them.

    Raises EngineError, which names the part of the event, and the model by its served name. Cancelled, it keeps
    nothing.
    """
    entries, where = _entries(event)
    if not any(isinstance(entry, Item) and entry.has_images for entry in entries):
        return nullcontext()
    messages: list[Any] = [entry.message if isinstance(entry, Item) else None for entry in entries]
    try:
        kept = await engine.keep_images(messages, where=where, timeout=IMAGE_TIMEOUT)
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
    """Return the items in an event, and their path."""
    if isinstance(event, ItemCreate):
        return (event.item,), "item"
    return (event.input or () if isinstance(event, ResponseCreate) else ()), "response.input"


def _of_event(place: str) -> str:
    """Drop the index of the only item of a conversation.item.create."""
    return place.replace("item[0].", "item.", 1) if place.startswith("item[0].") else place


# ---- items ----------------------------------------------------------------------------------------------------------


def parse_item(fields: object, where: str = "item") -> Item:
    """Parse an item. Raises ClientError, which names the unsupported field."""
    item = known_fields(fields, ("id", "object", "type", "status", "role", "content"), where)
    if item.get("type") != "message":
        message = f"{where}.type must be message, got {shown(item.get('type'))}"
        raise ClientError("unsupported_item", message, param=f"{where}.type")
    role = next((role for role in Role if role.value == item.get("role")), None)
    if role is None:
        message = f"{where}.role must be one of {', '.join(role.value for role in Role)}, got {shown(item.get('role'))}"
        raise ClientError("invalid_value", message, param=f"{where}.role")
    check_fixed(item, _ITEM_FIXED, where)
    content, param = item.get("content"), f"{where}.content"
    if not isinstance(content, list) or not 1 <= len(content) <= MAX_PARTS:
        problem = f"{len(content)} parts" if isinstance(content, list) else shown(content)
        message = f"{param} must be a list of 1 to {MAX_PARTS} parts, got {problem}"
        raise ClientError("invalid_value", message, param=param)
    parts = [_part(part, PART_TYPES[role], f"{param}[{index}]") for index, part in enumerate(content)]
    id, param = item.get("id"), f"{where}.id"
    if id is None:
        return Item(role, parts)
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ITEM_ID or id == ROOT:
        raise ClientError("invalid_value", f"{param} must be a string of 1 to {MAX_ITEM_ID} characters", param=param)
    return Item(role, parts, id)


def parse_input(value: object, where: str) -> tuple[Item | ItemReference, ...]:
    """Parse the input of a response, which replaces the conversation. Raises ClientError."""
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
