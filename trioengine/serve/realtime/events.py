"""The events that clients send: reading of messages, of the items and settings in them, and their images."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded, RequestRejected, TimedOut
from trioengine.serve.chat_tools import known_tools
from trioengine.serve.errors import ClientError
from trioengine.serve.ids import new_id
from trioengine.serve.parsing import as_served, check_unicode, either, load_object, shown
from trioengine.serve.reading import check_supported, read, unknown_names
from trioengine.serve.realtime.item import (
    PART_TYPES,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    Part,
    Role,
)
from trioengine.serve.realtime.items import ROOT
from trioengine.serve.realtime.requests import (
    EVENTS,
    HARMLESS,
    MAX_EVENT_ID,
    MAX_TOOLS_SIZE,
    UNSUPPORTED,
    ClientEvent,
    FlatTool,
    FunctionCall,
    FunctionCallOutput,
    GivenItem,
    InputImage,
    ItemCreate,
    ItemPart,
    ItemReference,
    ItemTruncate,
    ResponseCreate,
    ResponseSettings,
    SessionSettings,
    SessionUpdate,
)
from trioengine.serve.realtime.settings import GivenTools

IMAGE_TIMEOUT = 10.0  # seconds that an event, and all behind it, wait for room for its images
InputEntry: TypeAlias = Item | ItemReference
_AUDIO_END = "audio_end_ms"  # of the protocol's conversation.item.truncate; 0 is without effect
_RETENTION_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"token_limits": ()}
_KINDS: Mapping[str, re.Pattern[str]] = {  # codes of errors about a type, by its path
    "unsupported_item": re.compile(r"(item|response\.input\[[0-9]+\])\.type"),
    "unsupported_content": re.compile(r".*\.content\[[0-9]+\]\.type"),
}


class EventError(Exception):
    """A message is not an event that the server accepts; `event_id` is the client's, if any."""

    def __init__(self, cause: ClientError, event_id: str | None) -> None:
        super().__init__(str(cause))
        self.problem = cause.problem
        self.event_id = event_id


class UnknownMembers(NamedTuple):
    """Members of an object at a path that the server does not know, and those that it knows."""

    prefix: str  # of the path: empty, or "session."
    names: Sequence[str]
    known: Collection[str]


@dataclass(frozen=True, slots=True)
class Received:
    """An event that was read.

    `changes` are the members of its session or response by their names, without those that are absent; a null is None.
    """

    event: ClientEvent
    items: tuple[InputEntry, ...] = ()  # its item, or the input of its response
    changes: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[UnknownMembers, ...] = ()

    @property
    def item(self) -> Item:
        """The item of a conversation.item.create."""
        (item,) = self.items
        assert isinstance(item, Item), "only the input of a response has references"
        return item

    @property
    def response(self) -> ResponseSettings:
        """The members of a response.create's response."""
        assert isinstance(self.event, ResponseCreate), "other events have none"
        return self.event.response or ResponseSettings()


def parse(text: str | bytes) -> Received:
    """Read a message as an event. Raises EventError."""
    event_id = None
    try:
        if isinstance(text, bytes):
            raise ClientError("invalid_event", "events are text messages, this one is binary")
        fields = load_object(text, "the message", "invalid_event")
        event_id = _event_id(fields)
        check_unicode(fields, text)
        return _received(fields)
    except ClientError as exc:
        raise EventError(exc, event_id) from exc


def _event_id(fields: Mapping[str, Any]) -> str | None:
    """Return the client's id, before the rest is read, as errors about the rest repeat it. Raises ClientError."""
    event_id = fields.get("event_id")
    if event_id is not None and (not isinstance(event_id, str) or len(event_id) > MAX_EVENT_ID):
        rule = f"must be a string of at most {MAX_EVENT_ID} characters, got {shown(event_id)}"
        raise ClientError("invalid_value", f"event_id {rule}", param="event_id")
    return event_id


def _received(fields: Mapping[str, Any]) -> Received:
    event = _read(fields)
    known = type(event).__struct_encode_fields__
    unknown = [UnknownMembers("", unknown_names(fields, (*known, "type", _AUDIO_END)), known)]
    match event:
        case SessionUpdate():
            return _with_settings(event, event.session, fields["session"], "session", unknown)
        case ResponseCreate() if event.response is not None:
            return _with_settings(event, event.response, fields["response"], "response", unknown)
        case ItemCreate():
            return Received(event, (make_item(event.item, "item"),), unknown=tuple(unknown))
    return Received(event, unknown=tuple(unknown))


def _read(fields: Mapping[str, Any]) -> ClientEvent:
    name = fields.get("type")
    kind = EVENTS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(EVENTS)
        fault = "type is missing; it must be" if name is None else "type must be"
        given = "" if name is None else f", got {shown(name)}"
        raise ClientError("unknown_event", f"{fault} one of {known}{given}", param="type")
    if kind is ItemTruncate and fields.get(_AUDIO_END) not in (None, 0):
        message = f"{_AUDIO_END}: audio is not supported; text_end is the number of characters to keep"
        raise ClientError("unsupported_parameter", message, param=_AUDIO_END)
    try:
        return read(_typed(fields) if kind is ItemCreate else fields, kind)
    except ClientError as exc:
        problem = exc.problem
        for code, path in _KINDS.items():
            if path.fullmatch(problem.param or "") and problem.code == "invalid_value":
                raise ClientError(code, problem.message, param=problem.param) from None
        raise


def _typed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a conversation.item.create whose item has a type: one without a type is a message."""
    item = fields.get("item")
    return {**fields, "item": {"type": "message", **item}} if isinstance(item, Mapping) else fields


def _with_settings(
    event: SessionUpdate | ResponseCreate,
    settings: SessionSettings | ResponseSettings,
    given: Mapping[str, Any],
    where: str,
    unknown: Sequence[UnknownMembers],
) -> Received:
    check_supported(given, UNSUPPORTED, where)
    if isinstance(given.get("truncation"), Mapping):
        check_supported(given["truncation"], _RETENTION_UNSUPPORTED, f"{where}.truncation")
    known = settings.__struct_encode_fields__
    changes = {name: getattr(settings, name) for name in known if name in given}
    skipped: tuple[str, ...] = ()
    if changes.get("tools"):
        functions, skipped = known_tools(changes["tools"], FlatTool, f"{where}.tools")
        changes["tools"] = _sized_tools(functions, f"{where}.tools")
    entries = changes.pop("input", None) or ()
    items = tuple(
        entry if isinstance(entry, ItemReference) else make_item(entry, f"{where}.input[{index}]")
        for index, entry in enumerate(entries)
    )
    names = (*unknown_names(given, {*known, *HARMLESS, *UNSUPPORTED}), *skipped)
    return Received(event, items, changes, (*unknown, UnknownMembers(f"{where}.", names, known)))


def _sized_tools(functions: Sequence[FlatTool], where: str) -> GivenTools:
    """Return the tools. Raises ClientError for more than each response could be given at once."""
    tools = GivenTools.of(functions)
    if tools.size > MAX_TOOLS_SIZE:
        message = f"{where} must take at most {MAX_TOOLS_SIZE} bytes of memory, got {tools.size}"
        raise ClientError("invalid_value", message, param=where)
    return tools


# ---- items ---------------------------------------------------------------------------------------------------------


def make_item(given: GivenItem, where: str) -> Item:
    """Return the item. Raises ClientError for parts that its role does not have."""
    if given.id == ROOT:
        raise ClientError("invalid_value", f"{where}.id must be another string than {shown(ROOT)}", param=f"{where}.id")
    id = given.id or new_id("item_")
    match given:
        case FunctionCall():
            return FunctionCallItem(given.name, given.arguments, given.call_id or new_id("call_"), id=id)
        case FunctionCallOutput():
            return FunctionCallOutputItem(given.call_id, given.output, id=id)
    role = Role(given.role)
    parts = [_part(part, role, f"{where}.content[{index}]") for index, part in enumerate(given.content)]
    return MessageItem(role, parts, id=id)


def _part(part: ItemPart, role: Role, where: str) -> Part:
    kind, kinds = str(part.__struct_config__.tag), PART_TYPES[role]
    if kind not in kinds:
        rule = either([shown(name) for name in kinds])
        message = f"{where}.type must be {rule} in an item of the {role.value}, got {shown(kind)}"
        raise ClientError("unsupported_content", message, param=f"{where}.type")
    return msgspec.to_builtins(part) if isinstance(part, InputImage) else part.text


# ---- images --------------------------------------------------------------------------------------------------------


async def keep_images(engine: Engine, received: Received, model: str) -> AbstractContextManager[object]:
    """Hand the images of an event to the engine, which keeps them within the block, and take its form of them.

    Raises EngineError, which names the part of the event, and the model by its served name. Cancelled, it keeps
    nothing.
    """
    entries = received.items
    if not any(isinstance(entry, Item) and entry.has_images for entry in entries):
        return nullcontext()
    where = "item" if isinstance(received.event, ItemCreate) else "response.input"
    messages: list[Any] = [entry.message if isinstance(entry, Item) else None for entry in entries]
    try:
        kept = await engine.keep_images(messages, where=where, timeout=IMAGE_TIMEOUT)
    except TimedOut as exc:
        raise EngineOverloaded(str(exc), code="payloads", is_full=True) from None
    except RequestRejected as exc:
        message = as_served(exc.message, engine.config.model, model)
        raise RequestRejected(exc.code, _of_event(message), param=_of_event(exc.param or "")) from None
    for entry, taken in zip(entries, kept.messages, strict=True):
        if isinstance(entry, MessageItem):
            entry.take_images(taken)
    return kept


def _of_event(place: str) -> str:
    """Drop the index of the only item of a conversation.item.create."""
    return place.replace("item[0].", "item.", 1) if place.startswith("item[0].") else place
