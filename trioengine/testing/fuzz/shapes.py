"""The shapes of HTTP responses, written from docs/http.md: heads, errors, completions and the events of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioengine.testing.toy_model import END_OF_TEXT, IM_END, IM_START, toy_logprobs

INVALID, RATE, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
BAD_FIELDS = (
    *("invalid_type", "invalid_value", "missing_parameter", "unsupported_parameter", "unsupported_content"),
    "invalid_grammar",
)
_IMAGES = ("images_not_supported", "invalid_image_url", "invalid_image_format", "image_parse_error", "invalid_image")
_BAD_REQUESTS = ("bad_request", "pipelined_too_much", "chunks_too_small")
_CODES: Mapping[tuple[int, str], tuple[str, ...]] = {  # of errors, by status and type
    (400, INVALID): ("invalid_json", *BAD_FIELDS, *_IMAGES, *_BAD_REQUESTS, "context_length_exceeded", "empty_prompt"),
    (401, INVALID): ("invalid_api_key",),
    (403, INVALID): ("admin_key_required", "forbidden", "no_weights_dir"),
    (404, INVALID): ("model_not_found", "not_found", "weights_not_found"),
    (405, INVALID): ("method_not_allowed",),
    (408, INVALID): ("request_timeout",),
    (409, SERVER): ("transition_failed",),
    (409, INVALID): ("image_dropped",),
    (413, INVALID): ("body_too_large", "too_large"),
    (415, INVALID): ("unsupported_encoding",),
    (422, INVALID): ("template_error", "no_chat_template", "no_token_left"),
    (426, INVALID): ("upgrade_required",),
    (429, RATE): ("overloaded", "too_many_sessions", "key_buffers_full"),
    (431, INVALID): ("head_too_large",),
    (501, INVALID): ("bad_request",),
    (500, SERVER): ("aborted", "abort_all", "sampling_failed"),
    (503, SERVER): (
        *("asleep", "sleep", "overloaded", "worker_lost", "shutting_down", "shutdown"),
        *("too_many_connections", "buffers_full"),
    ),
}
WAITS = ("overloaded", "asleep", "too_many_sessions", "key_buffers_full", "buffers_full", "too_many_connections")
RETRIED = (429, 503)  # their responses have a Retry-After
SPECIAL = {END_OF_TEXT: b"<|endoftext|>", IM_START: b"<|im_start|>", IM_END: b"<|im_end|>"}


def has_fields(found: object, names: Collection[str], what: str) -> Mapping[str, Any]:
    """Check that it is an object with these fields and no others; return it."""
    assert isinstance(found, dict), f"{what} is {found!r}"
    assert set(found) == set(names), f"{what} has the fields {sorted(found)}, and not {sorted(names)}: {found}"
    return found


# ---- heads and errors -----------------------------------------------------------------------------------------------


@dataclass
class Head:
    """The status and the headers of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def value(self, name: bytes) -> str | None:
        """The header of this name; AssertionError if it is repeated."""
        values = [value.decode() for key, value in self.headers if key.lower() == name]
        assert len(values) <= 1, f"the header {name.decode()} is sent {len(values)} times: {values}"
        return values[0] if values else None

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after this response."""
        return (b"connection", b"close") in self.headers


def check_head(head: Head, content_type: str, request_id: str | None) -> None:
    """Check the headers that every response has; `request_id` is that of the request, unless it was not read."""
    found = head.value(b"content-type")
    assert found == content_type, f"the content type of a {head.status} is {found}, and not {content_type}"
    assert head.value(b"date"), f"a {head.status} without a Date"
    shown = head.value(b"x-request-id")
    assert shown and request_id in (None, shown), f"the request is {request_id}, and its response {shown}"
    is_retried = head.value(b"retry-after") is not None
    assert is_retried == (head.status in RETRIED), f"a {head.status} with the headers {head.headers}"


def check_problem(error: object, head: Head | None = None) -> dict[str, Any]:
    """Check an error object, by itself or as the body of a response with this head; return it."""
    names = ("type", "code", "message", "param")
    assert isinstance(error, dict), f"the error is {error!r}"
    code, kind = error.get("code"), error.get("type")
    statuses = [status for (status, each), codes in _CODES.items() if each == kind and code in codes]
    assert statuses, f"no error has this type and code: {error}"
    has_fields(error, (*names, "retry_after") if code in WAITS else names, "an error")
    assert error["message"] and isinstance(error["message"], str), f"the error has no message: {error}"
    assert error["param"] is None or isinstance(error["param"], str), f"the error has no such param: {error}"
    assert code not in BAD_FIELDS or error["param"] or error["message"].startswith("the body"), (
        f"the error names no field: {error}"
    )
    if head is not None:
        assert head.status in statuses, f"the status is {head.status} for {error}"
        after = head.value(b"retry-after")
        if after is not None and "retry_after" in error:
            assert int(after) == max(1, round(error["retry_after"])), f"Retry-After is {after} for {error}"
    return error


# ---- answers --------------------------------------------------------------------------------------------------------


@dataclass
class Given:
    """An answer, or the part of it that has come."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None


def _check_ids(found: Mapping[str, Any], name: str, model: str) -> None:
    assert found["object"] == name and found["model"] == model, f"no {name} of {model}: {found}"
    assert str(found["id"]).startswith("chatcmpl-") and isinstance(found["created"], int), f"its id: {found}"
    assert re.fullmatch("fp_[0-9a-f]{12}", found["system_fingerprint"]), f"its fingerprint: {found}"


def _check_usage(usage: object) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
    found = dict(has_fields(usage, names, "the usage"))
    assert found["total_tokens"] == found["prompt_tokens"] + found["completion_tokens"], f"the sum in {found}"
    has_fields(found["prompt_tokens_details"], ("cached_tokens",), "the details of the prompt")
    return found


def _logprobs(found: object, top: int | None) -> list[dict[str, Any]]:
    if top is None:
        assert found is None, f"log-probabilities that were not asked for: {found}"
        return []
    has_fields(found, ("content", "refusal"), "the logprobs")
    assert isinstance(found, dict) and isinstance(found["content"], list), f"the logprobs are {found}"
    return found["content"]


def check_whole(body: Mapping[str, Any], model: str, top: int | None) -> Given:
    """Check a chat.completion, and return the answer in it."""
    has_fields(body, ("id", "object", "created", "model", "system_fingerprint", "choices", "usage"), "a completion")
    _check_ids(body, "chat.completion", model)
    assert len(body["choices"]) == 1, f"the choices are {body['choices']}"
    choice = has_fields(
        body["choices"][0], ("index", "message", "logprobs", "finish_reason", "stop_reason"), "a choice"
    )
    message = has_fields(choice["message"], ("role", "content", "refusal"), "a message")
    assert (choice["index"], message["role"], message["refusal"]) == (0, "assistant", None), f"it is {choice}"
    return Given(
        message["content"],
        choice["finish_reason"],
        _check_usage(body["usage"]),
        _logprobs(choice["logprobs"], top),
    )


class ChatStream:
    """The events of a stream as they come; raises AssertionError for one that is out of order or out of shape."""

    def __init__(self, model: str, top: int | None, *, has_usage: bool) -> None:
        self.given = Given()
        self.is_done = False  # [DONE] has come
        self.num_texts = 0  # events that have text
        self._model = model
        self._top = top
        self._has_usage = has_usage
        self._common: tuple[str, int] | None = None  # id and time of all chunks
        self._rest = b""

    @property
    def id(self) -> str | None:
        """The id of all chunks, once one has come."""
        return None if self._common is None else self._common[0]

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        *frames, self._rest = (self._rest + data).split(b"\n\n")
        for frame in frames:
            self._take(frame.decode())

    def end(self) -> Given:
        """The body is over: return the answer."""
        assert not self._rest, f"a torn event: {self._rest!r}"
        assert self.is_done, f"the stream ends without [DONE]: {self.given}"
        return self.given

    def _take(self, frame: str) -> None:
        assert not self.is_done, f"after [DONE] comes {frame}"
        if frame == ": keep-alive":
            return
        assert frame.startswith("data: "), f"an event of another kind: {frame}"
        data, given = frame.removeprefix("data: "), self.given
        if data == "[DONE]":
            is_whole = given.finish_reason is not None and (given.usage is not None) == self._has_usage
            assert given.error is not None or is_whole, f"[DONE] comes too early: {given}"
            self.is_done = True
            return
        event = json.loads(data)
        assert given.error is None and given.usage is None, f"after the end comes {event}"
        if "error" in event:
            assert given.finish_reason is None, f"after the end comes {event}"
            given.error = check_problem(has_fields(event, ("error",), "an event")["error"])
            return
        self._take_chunk(event)

    def _take_chunk(self, event: Mapping[str, Any]) -> None:
        names = ("id", "object", "created", "model", "system_fingerprint", "choices")
        has_fields(event, (*names, "usage") if self._has_usage else names, "a chunk")
        _check_ids(event, "chat.completion.chunk", self._model)
        common, is_first = (event["id"], event["created"]), self._common is None
        assert self._common in (None, common), f"the chunks before had {self._common}: {event}"
        self._common = common
        if not event["choices"]:
            assert self.given.finish_reason is not None and self._has_usage, f"a chunk without choices: {event}"
            self.given.usage = _check_usage(event["usage"])
            return
        assert event.get("usage") is None, f"a usage before the end: {event}"
        (choice,) = event["choices"]
        shown = ("index", "delta", "logprobs", "finish_reason")
        has_fields(choice, shown if choice.get("finish_reason") is None else (*shown, "stop_reason"), "a choice")
        assert choice["index"] == 0, f"another index: {event}"
        self._take_choice(choice, is_first=is_first)

    def _take_choice(self, choice: Mapping[str, Any], *, is_first: bool) -> None:
        given, delta, reason = self.given, choice["delta"], choice["finish_reason"]
        assert given.finish_reason is None, f"after the finish reason comes {choice}"
        if is_first or reason is not None:
            expected = {"role": "assistant", "content": ""} if is_first else {}
            assert delta == expected and choice["logprobs"] is None, f"the first or last choice is {choice}"
            assert not (is_first and reason), f"the first choice is the last one: {choice}"
            given.finish_reason = reason
            return
        has_fields(delta, ("content",), "a delta")
        assert delta["content"] or self._top is not None, f"an empty delta: {choice}"
        self.num_texts += 1
        given.text += delta["content"]
        if choice["logprobs"] is not None or self._top is None:  # a text may come later than its tokens
            given.logprobs += _logprobs(choice["logprobs"], self._top)


# ---- the model's own arithmetic -------------------------------------------------------------------------------------


def check_logprobs(found: Sequence[Mapping[str, Any]], token_ids: Sequence[int], top: int) -> None:
    """Compare the log-probabilities of an answer with the toy model's."""
    assert len(found) == len(token_ids), f"{len(found)} logprobs, the answer has {len(token_ids)} tokens"
    for entry, token_id in zip(found, token_ids, strict=True):
        values = toy_logprobs(token_id, max(top, 1))
        best = [_shown_token(each, values[each]) for each in list(values)[:top]]
        expected = {**_shown_token(token_id, values[token_id]), "top_logprobs": best}
        assert entry == expected, f"the logprobs of token {token_id} are {entry}, and not {expected}"


def _shown_token(token_id: int, logprob: float) -> dict[str, Any]:
    data = SPECIAL.get(token_id) or bytes((token_id,))
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def longest_prefix(prompt: Sequence[int], earlier: Iterable[Sequence[int]]) -> int:
    """How many tokens of the prompt one of the earlier histories begins with."""
    return max((_num_common(prompt, history) for history in earlier), default=0)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
