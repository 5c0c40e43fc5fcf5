"""HTTP messages: requests, responses, and checks on a request's head beyond h11's.

The checks refuse forms that another HTTP parser on the way may read differently, by the rules of RFC 9112: h11 is
lenient about line ends, folded headers, versions and targets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trioengine.serve.body import Body
from trioengine.serve.errors import INVALID_REQUEST, Problem, problem_of, status_of
from trioengine.serve.key_sessions import SessionShare
from trioengine.serve.limits import Held

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]  # names in lower case, and values
STREAM_HEADERS: Headers = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_SINGLE = (b"host", b"origin", b"sec-websocket-key", b"sec-websocket-version")  # headers that must not be repeated
_VERSIONS = (b"1.0", b"1.1")
_AUTHORITY = rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]*)(?::[0-9]{0,5})?"  # no user info
_HOST = re.compile(_AUTHORITY)
_ORIGIN = re.compile(rb"https?://(?=[^:])" + _AUTHORITY)
_PLAIN_ORIGIN = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://(?=[^:])" + _AUTHORITY)
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)
_FIELDS = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9a-z-]+\0(?:[^\0\s]+(?:[ \t]+[^\0\s]+)*)?\0)*")  # names, and h11's values
_TLS = b"\x16\x03"  # the first record of a TLS handshake (RFC 8446, section 5.1)
_FAULTS = {  # our wording of those h11 messages that do not quote the client
    "Found multiple Host: headers": "the request has more than one Host header",
    "Missing mandatory Host: header": "the request has no Host header",
    "conflicting Content-Length headers": "the request has different values of Content-Length",
    "bad Content-Length": "the Content-Length is not a number",
    "Only Transfer-Encoding: chunked is supported": "the Transfer-Encoding must be chunked",
    "multiple Transfer-Encoding headers": "the request has more than one Transfer-Encoding header",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes = field(default=b"", repr=False)
    http_version: bytes = b"1.1"
    cache_salt: bytes = field(default=b"", repr=False)  # of its key
    held: Held | None = field(default=None, repr=False)  # accounts for the bytes of its body
    sessions: SessionShare | None = field(default=None, repr=False)  # of its key

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def wants_websocket(self) -> bool:
        return (self.header(b"upgrade") or b"").lower() == b"websocket"

    @property
    def is_chunked(self) -> bool:
        return self.header(b"transfer-encoding") is not None

    @property
    def has_body(self) -> bool:
        return self.is_chunked or self.header(b"content-length") not in (None, b"0")

    @property
    def is_encoded(self) -> bool:
        """Whether the body is compressed, or transformed in another way."""
        return self.has_body and (self.header(b"content-encoding") or b"identity").lower() != b"identity"

    @property
    def has_ambiguous_length(self) -> bool:
        """Whether proxies on the way may see another end of the body than we do (RFC 9112, section 6.1)."""
        return self.is_chunked and (self.header(b"content-length") is not None or self.http_version < b"1.1")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = ()
    problem: Problem | None = None  # the error that the body describes, for the log


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A response whose body comes in pieces: `write` sends them, after the request has been dropped.

    Until the first piece `write` may return a whole response instead, or raise an error that becomes one. It is
    cancelled when the client disconnects.
    """

    write: Callable[[Body], Awaitable[HttpResponse | None]]
    status: int = 200
    content_type: bytes = b"text/event-stream"
    headers: Headers = STREAM_HEADERS
    keep_alive: bytes = b""  # a piece without content, sent while the stream is silent


Handler: TypeAlias = Callable[[HttpRequest], Awaitable[HttpResponse | StreamingResponse]]


class BadRequest(Exception):
    """Refuses a request; the connection is closed after this response."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status)
        self.response = response

    @classmethod
    def of(cls, status: int, code: str, message: str) -> BadRequest:
        return cls(problem_response(status, Problem(INVALID_REQUEST, code, message)))


def json_response(status: int, content: Any) -> HttpResponse:
    return HttpResponse(status, json.dumps(content).encode())


def problem_response(status: int, problem: Problem) -> HttpResponse:
    """Return an error in OpenAI's shape."""
    retry_after = problem.retry_after or (1.0 if status in (429, 503) else None)
    headers = ((b"retry-after", b"%d" % max(1, round(retry_after))),) if retry_after else ()
    return HttpResponse(status, json.dumps({"error": problem.to_json()}).encode(), headers=headers, problem=problem)


def error_response(error: Exception) -> HttpResponse:
    """Return the client's view of an error."""
    return problem_response(status_of(error), problem_of(error))


def header_lines(headers: Headers | list[tuple[bytes, bytes]]) -> bytes:
    """Render a response's headers, whose names are in lower case.

    Raises ValueError for a name that is not, or a value that would not be read as it is.
    """
    fields = b"".join([b"%b\0%b\0" % header for header in headers])
    if fields.count(b"\0") != 2 * len(headers) or not _FIELDS.fullmatch(fields):
        raise ValueError("a response has a header that is not allowed")
    return b"".join([b"%b: %b\r\n" % header for header in headers])


# ---- checks on a request's head -----------------------------------------------------------------------------------


class BadHead(Exception):
    """A request's head is refused; the message is meant for the client."""


def describe_fault(error: Exception, data: bytes) -> str:
    """Describe for client and log why h11 refused a request that begins with `data`."""
    if data.startswith(_TLS):
        return "the bytes are TLS, and this server speaks plain HTTP; with an --ssl-certfile it speaks TLS"
    return _FAULTS.get(str(error), "the bytes are not an HTTP/1.1 request")


def check_lines(head: bytes, version: bytes) -> None:
    """Raise BadHead for a bare line feed, a folded header, or a version other than 1.0 and 1.1."""
    if head.count(b"\n") != head.count(b"\r\n"):
        raise BadHead("a line of the head ends with a bare line feed")
    if b"\r\n " in head or b"\r\n\t" in head:
        raise BadHead("a header is folded over several lines")
    if version not in _VERSIONS:
        raise BadHead("the version must be HTTP/1.0 or HTTP/1.1")


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the Host header, if any. Raises BadHead if it is malformed, or a header is repeated that must not be."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _SINGLE:
            if name in found:
                shown = name.decode().title().replace("Websocket", "WebSocket")
                raise BadHead(f"the request has more than one {shown} header")
            found[name] = value
    host = found.get(b"host")
    if host is not None and not _HOST.fullmatch(host):
        raise BadHead("the Host header must be a name or an address, and a port")
    return host


def split_target(target: bytes, host: bytes | None) -> tuple[str, str]:
    """Split a request's target, a path or a URL whose authority is the Host, into path and query. Raises BadHead.

    A target that begins with two slashes is a path (RFC 9112, section 3.2.1): it has no authority.
    """
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        authority, target = absolute.groups()
        if host is None or authority.lower() != host.lower():
            raise BadHead("the request's target is a URL whose host is not that of the Host header")
        target = target if target.startswith(b"/") else b"/" + target
    if not target.startswith(b"/"):
        raise BadHead("the request's target must be a path")
    if b"#" in target:
        raise BadHead("the request's target has a fragment")
    path, _, query = target.decode("ascii").partition("?")
    return path, query


def name_of_host(host: bytes) -> str:
    """Return the name or address in a Host header, without port and brackets; empty if malformed."""
    return _name(_HOST.fullmatch(host))


def name_of_origin(origin: bytes) -> str:
    """Return the name or address in an http or https Origin; empty for any other."""
    return _name(_ORIGIN.fullmatch(origin))


def is_plain_origin(origin: bytes) -> bool:
    """Whether an Origin is a scheme, a name or address, and at most a port."""
    return _PLAIN_ORIGIN.fullmatch(origin) is not None


def _name(match: re.Match[bytes] | None) -> str:
    return "" if match is None else match.group(1).decode().strip("[]")
