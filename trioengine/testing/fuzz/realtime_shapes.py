"""The shapes of Realtime events, written from docs/websocket.md: their fields, and the order of a response's events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioengine.testing.fuzz.conversations import Content, Turn, item_content, pictures_of, text_of
from trioengine.testing.fuzz.shapes import RATE, SERVER, WAITS, has_fields
from trioengine.testing.fuzz.tools import is_json

_ITEM_SIZE = 512  # bytes that an item counts, beside its texts; an image counts as many
_PLACE = ("response_id", "item_id", "output_index", "content_index")
_CALL_PLACE = ("response_id", "item_id", "output_index", "call_id")
_ITEM = ("previous_item_id", "item")
_FIELDS: Mapping[str, tuple[str, ...]] = {  # of each event, beside the fields that all have
    "session.created": ("session",),
    "session.updated": ("session",),
    "conversation.item.added": _ITEM,
    "conversation.item.done": _ITEM,
    "conversation.item.retrieved": ("item",),
    "conversation.item.truncated": ("item_id", "content_index", "text_end", "audio_end_ms"),
    "conversation.item.deleted": ("item_id",),
    "response.created": ("response",),
    "response.done": ("response",),
    "response.output_item.added": ("response_id", "output_index", "item"),
    "response.output_item.done": ("response_id", "output_index", "item"),
    "response.content_part.added": (*_PLACE, "part"),
    "response.content_part.done": (*_PLACE, "part"),
    "response.output_text.delta": (*_PLACE, "delta"),
    "response.output_text.done": (*_PLACE, "text"),
    "response.function_call_arguments.delta": (*_CALL_PLACE, "delta"),
    "response.function_call_arguments.done": (*_CALL_PLACE, "name", "arguments"),
    "engine.state": ("state", "weight_version", "input_modalities"),
    "error": ("error",),
}
_ITEM_FIELDS = ("id", "object", "type", "status")
_FIELDS_OF_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("name", "call_id", "arguments"),
    "function_call_output": ("call_id", "output"),
}
CALL_ID = "c"  # of a call that the client answers; the model has made no such call
_RESPONSE_FIELDS = (
    *("id", "object", "status", "status_details", "output", "conversation_id", "output_modalities"),
    *("max_output_tokens", "usage", "metadata", "dropped_turns", "dropped_item_ids"),
)
_STATES = ("awake", "sleeping", "updating", "loading", "restarting", "draining")
_REASONS = {"incomplete": "max_output_tokens", "cancelled": "client_cancelled"}
ALWAYS_REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {  # an event, and the code and the param of its error
    "odd": ("conversation.fly", {}, "unknown_event", "type"),
    "tools": ("session.update", {"session": {"tools": [{}]}}, "missing_parameter", "session.tools[0].name"),
    "half a pair": ("session.update", {"session": {"instructions": "\ud800"}}, "invalid_value", "session.instructions"),
    "too hot": ("session.update", {"session": {"temperature": 101}}, "invalid_value", "session.temperature"),
    "no session": ("session.update", {}, "missing_parameter", "session"),
    "no item": ("conversation.item.retrieve", {"item_id": "none"}, "item_not_found", "item_id"),
    "wrong role": (
        "conversation.item.create",
        {"item": {"type": "message", "role": "x", "content": []}},
        "invalid_value",
        "item.role",
    ),
    "no parts": (
        "conversation.item.create",
        {"item": {"type": "message", "role": "user", "content": []}},
        "invalid_value",
        "item.content",
    ),
    "after nothing": (
        "conversation.item.create",
        {
            "item": {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "a"}]},
            "previous_item_id": "none",
        },
        "item_not_found",
        "previous_item_id",
    ),
    "no tokens": (
        "response.create",
        {"response": {"max_output_tokens": 0}},
        "invalid_value",
        "response.max_output_tokens",
    ),
    "no response": ("response.cancel", {"response_id": "none"}, "response_cancel_not_active", "response_id"),
}

PASSED_OVER = {  # settings without effect on text, as OpenAI's packages send them
    "audio": {"input": {"turn_detection": {"type": "semantic_vad"}}, "output": {"voice": "ash"}},
    "tracing": "auto",
    "speed": 1.5,
}
TOO_MUCH = ("overloaded", "key_buffers_full")  # may be a rate limit


def check_event(event: Mapping[str, Any], number: int, model: str, window: float = 0.0) -> None:
    """Check the fields of the event with this number in its session; `window` is the session's, in seconds, or 0."""
    kind = str(event.get("type"))
    assert kind in _FIELDS, f"an event of another kind: {event}"
    more = ("resume",) if window and kind == "session.created" else ()
    has_fields(event, ("event_id", "type", "sequence_number", *_FIELDS[kind], *more), kind)
    if more:
        resume = has_fields(event["resume"], ("token", "seconds"), "the resumption")
        assert resume["token"] and resume["seconds"] == window, f"{window:g} s were asked for, not {resume}"
    assert event["sequence_number"] == number, f"sequence_number is not {number}: {event}"
    assert (kind == "session.created") == (number == 0), f"the first event is session.created, and comes once: {event}"
    assert event.get("content_index", 0) == 0, f"an item of a response has one part: {event}"
    if "item" in event:
        check_item(event["item"])
    match kind:
        case "session.created" | "session.updated":
            session = event["session"]
            assert (session["object"], session["model"]) == ("realtime.session", model), f"the session is {session}"
        case "engine.state":
            is_known = event["state"] in _STATES and event["weight_version"] >= 1
            assert is_known and event["input_modalities"] in (["text"], ["text", "image"]), f"the state is {event}"
        case "error":
            check_error(event["error"])


def check_item(item: object) -> None:
    """Check the fields of an item."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    found = has_fields(item, (*_ITEM_FIELDS, *_FIELDS_OF_ITEMS.get(str(kind), ())), "an item")
    assert found["object"] == "realtime.item" and kind in _FIELDS_OF_ITEMS, f"the item is {found}"
    if kind == "function_call_output":
        assert found["call_id"] == CALL_ID, f"the item is {found}"
    if kind != "message":
        return
    kinds = {"output_text"} if found["role"] == "assistant" else {"input_text", "input_image"}
    assert {part["type"] for part in found["content"]} <= kinds, f"the parts of {found}"


def check_error(error: object) -> None:
    """Check the fields of an error event's error."""
    assert isinstance(error, dict), f"the error is {error!r}"
    names = ("type", "code", "message", "param", "event_id")
    has_fields(error, (*names, "retry_after") if error.get("code") in WAITS else names, "an error")
    assert error["message"] and error["code"], f"the error is empty: {error}"
    if error["type"] == RATE:
        assert error["code"] in TOO_MUCH, f"no rate was limited: {error}"
    elif error["code"] in WAITS:
        assert error["type"] == SERVER, f"it is not the client's error: {error}"


class ResponseEvents:
    """The events of one response, from response.created to response.done; raises AssertionError for a wrong one."""

    def __init__(
        self, created: Mapping[str, Any], max_output_tokens: object, metadata: object, *, has_tools: bool
    ) -> None:
        self.item_id: str | None = None  # of the latest item
        self.outputs: list[tuple[str, str]] = []  # the type of each item, and its text or arguments so far
        self._has_tools = has_tools
        self._created = has_fields(created, _RESPONSE_FIELDS, "a response")
        self._is_in_conversation = created["conversation_id"] is not None
        begun = created["status"], created["status_details"], created["output"], created["usage"]
        assert begun == ("in_progress", None, [], None), f"a response begins as {created}"
        dropped = created["dropped_turns"], created["dropped_item_ids"]
        assert dropped == (0, []), f"a response in progress has dropped {dropped}"
        asked = created["object"], created["output_modalities"], created["max_output_tokens"], created["metadata"]
        assert asked == ("realtime.response", ["text"], max_output_tokens, metadata), f"it was asked for {asked}"
        self._seen: list[str] = []
        self._items: list[Mapping[str, Any]] = []  # that are done

    @property
    def text(self) -> str:
        """The text of the latest item, or its arguments."""
        return self.outputs[-1][1] if self.outputs else ""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event about the response, or about an item of it in the conversation."""
        kind = event["type"].removeprefix("response.")
        expected = self._next()
        assert kind in expected, f"after {self._seen[-2:]} comes {kind}, and not {' or '.join(expected)}"
        if not (kind.endswith(".delta") and self._seen[-1] == kind):
            self._seen.append(kind)
        item = event.get("item")
        if kind == "output_item.added":
            self.item_id = event["item"]["id"]
            self.outputs.append((event["item"]["type"], ""))
        place = event.get("output_index", len(self.outputs) - 1), item["id"] if item is not None else event["item_id"]
        assert place == (len(self.outputs) - 1, self.item_id), (
            f"the latest item is {self.item_id}, and the event {event}"
        )
        if item is not None:
            self._check_item(item, is_done=kind.endswith("done"))
        if kind == "output_item.done":
            self._items.append(event["item"])
        self._take_text(kind, event)

    def _take_text(self, kind: str, event: Mapping[str, Any]) -> None:
        match kind:
            case "content_part.added":
                assert event["part"]["text"] == "", f"a part begins with text: {event}"
            case "output_text.delta" | "function_call_arguments.delta":
                assert event["delta"], f"an empty delta: {event}"
                self.outputs[-1] = self.outputs[-1][0], self.text + event["delta"]
            case "output_text.done":
                assert event["text"] == self.text, f"the deltas give {self.text!r}, and then {event['text']!r}"
            case "function_call_arguments.done":
                assert event["arguments"] == self.text, f"the deltas give {self.text!r}, and then {event}"
            case "content_part.done":
                assert event["part"]["text"] == self.text, f"the deltas give {self.text!r}, and then {event}"

    def _next(self) -> tuple[str, ...]:
        last = self._seen[-1] if self._seen else "created"
        of_item = "conversation.item."
        begun: tuple[str, ...] = ("content_part.added",)
        if self.outputs and self.outputs[-1][0] == "function_call":
            begun = ("function_call_arguments.delta", "function_call_arguments.done")
        done = (f"{of_item}done",) if self._is_in_conversation else ("output_item.done",)
        following: Mapping[str, tuple[str, ...]] = {
            "created": ("output_item.added",),
            "output_item.added": (f"{of_item}added",) if self._is_in_conversation else begun,
            f"{of_item}added": begun,
            "content_part.added": ("output_text.delta", "output_text.done"),
            "output_text.delta": ("output_text.delta", "output_text.done"),
            "output_text.done": ("content_part.done",),
            "content_part.done": done,
            "function_call_arguments.delta": ("function_call_arguments.delta", "function_call_arguments.done"),
            "function_call_arguments.done": done,
            f"{of_item}done": ("output_item.done",),
            "output_item.done": ("done", "output_item.added") if self._has_tools else ("done",),
        }
        return following[last]

    def _check_item(self, item: Mapping[str, Any], *, is_done: bool) -> None:
        is_call = item["type"] == "function_call"
        assert is_call or item["role"] == "assistant", f"an item of the model's is {item}"
        text = item["arguments"] if is_call else "".join(part["text"] for part in item["content"])
        due = item["type"], text if is_done else ""
        assert text == due[1] and self.outputs[-1] == due, f"the deltas give {self.outputs[-1]}, and the item is {item}"
        assert (item["status"] == "in_progress") != is_done, f"the item is {item}"

    def end(self, done: Mapping[str, Any], error: Mapping[str, Any] | None) -> None:
        """Check response.done; `error` comes from the last error event about the response."""
        status, details = done["status"], done["status_details"]
        has_fields(done, _RESPONSE_FIELDS, "a response")
        last = self._seen[-1] if self._seen else None
        assert last in (None, "output_item.done"), f"after {last} comes response.done"
        for name in ("id", "object", "conversation_id", "output_modalities", "max_output_tokens", "metadata"):
            assert done[name] == self._created[name], f"{name} was {self._created[name]}, and is {done[name]}"
        assert done["output"] == self._items, f"the output is {done['output']}, and not {self._items}"
        for item in self._items:
            is_whole = status == "completed" or item is not self._items[-1]
            if item["type"] == "function_call":
                is_whole = is_json(item["arguments"])
            due = "completed" if is_whole else "incomplete"
            assert item["status"] == due, f"the response is {status}, an item of it is {item}"
        if status in _REASONS:
            assert details == {"type": status, "reason": _REASONS[status]}, f"{status} because of {details}"
        elif status == "failed":
            has_fields(details, ("type", "error"), "the details")
            named = {name: (error or {}).get(name) for name in ("type", "code", "message")}
            assert details["error"] == named, f"it failed by {details}, the error before it was {error}"
        else:
            assert status == "completed" and details is None, f"a response ends as {status}: {details}"

    def check_usage(self, usage: object, prompt: int, at_least: int, at_most: int) -> None:
        """Check the usage of a prompt, and of an answer of so many tokens."""
        names = ("total_tokens", "input_tokens", "output_tokens", "input_token_details", "output_token_details")
        found = has_fields(usage, names, "the usage")
        assert found["total_tokens"] == found["input_tokens"] + found["output_tokens"], f"the sum in {found}"
        assert found["input_tokens"] == prompt, (
            f"the usage counts {found['input_tokens']} tokens, the prompt has {prompt}"
        )
        counted, cached = found["output_tokens"], found["input_token_details"]["cached_tokens"]
        assert at_least <= counted <= at_most, f"the usage counts {counted} tokens, and not {at_least} to {at_most}"
        assert 0 <= cached <= max(prompt - 1, 0), f"{cached} tokens of {prompt} are cached"


def user_item(content: Content) -> dict[str, Any]:
    """An item of the user's, as a client sends it."""
    return {"type": "message", "role": "user", "content": item_content(content)}


def output_item(text: str) -> dict[str, Any]:
    """The output of a call, as a client sends it."""
    return {"type": "function_call_output", "call_id": CALL_ID, "output": text}


def role_of(item: Mapping[str, Any]) -> str:
    """The role of the message that an item becomes."""
    return "tool" if item["type"] == "function_call_output" else str(item["role"])


def text_in(item: Mapping[str, Any]) -> str:
    """The text of an item's parts, or its output."""
    return str(item["output"]) if "output" in item else "".join(part.get("text", "") for part in item["content"])


def size_of_item(turn: Turn) -> int:
    """The bytes that an item with this role and content counts in its conversation."""
    role, content = turn
    call = len(CALL_ID) if role == "tool" else 0
    return _ITEM_SIZE * (1 + len(pictures_of(content))) + len(text_of(content)) + call
