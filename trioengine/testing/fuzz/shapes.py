"""The shapes of HTTP responses, written from docs/http.md: heads and errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Check the headers that every response has; `request_id` is the request's, or None if it was not read."""
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


def longest_prefix(prompt: Sequence[int], earlier: Iterable[Sequence[int]]) -> int:
    """How many tokens of the prompt one of the earlier histories begins with."""
    return max((_num_common(prompt, history) for history in earlier), default=0)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
