"""HTTP/1.1 on one connection: requests in, responses out, limits on both, and a watch for clients that go away."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

import h11
import trio

from trioengine.core.errors import EngineError
from trioengine.serve.body import CHUNK, Body, Disconnected, Frame, Sender, StreamingResponse
from trioengine.serve.config import ConnectionLimits
from trioengine.serve.errors import (
    INVALID_REQUEST,
    ClientError,
    OverBudget,
    Problem,
    RequestAborted,
    problem_of,
    status_of,
)
from trioengine.serve.limits import Held

logger = logging.getLogger("trioengine")
T = TypeVar("T")
MAX_PIPELINED = 64 << 10  # bytes
END_OF_CHUNKS = b"\r\n\r\n"  # also behind trailers
MAX_FRAMING = 64 << 10  # bytes around the chunks of a body, beside as many as are in them


@dataclass(frozen=True, slots=True)
class Request:
    """A request; header names are in lower case."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = field(default=b"", repr=False)
    http_version: bytes = b"1.1"
    cache_salt: bytes = field(default=b"", repr=False)  # of its key
    held: Held | None = field(default=None, repr=False)  # has the bytes of its body

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def wants_websocket(self) -> bool:
        return (self.header(b"upgrade") or b"").lower() == b"websocket"

    @property
    def has_body(self) -> bool:
        return self.header(b"transfer-encoding") is not None or self.header(b"content-length") not in (None, b"0")

    @property
    def is_framed_twice(self) -> bool:
        """Where its body ends, others on the way may see in another way than we do (RFC 9112, section 6.1)."""
        is_chunked = self.header(b"transfer-encoding") is not None
        return is_chunked and (self.header(b"content-length") is not None or self.http_version < b"1.1")


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    problem: Problem | None = None  # that the body describes, for the log


Handler: TypeAlias = Callable[[Request], Awaitable[Response | StreamingResponse]]


class BadRequest(Exception):
    """A request that is not served; the connection is closed after this response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


def json_response(status: int, content: Any) -> Response:
    return Response(status, json.dumps(content).encode())


def problem_response(status: int, problem: Problem) -> Response:
    """An error in OpenAI's shape."""
    retry_after = problem.retry_after or (1.0 if status in (429, 503) else None)
    headers = ((b"retry-after", b"%d" % max(1, round(retry_after))),) if retry_after else ()
    return Response(status, json.dumps({"error": problem.to_json()}).encode(), headers=headers, problem=problem)


def error_response(error: Exception) -> Response:
    """What a client is told of an error."""
    return problem_response(status_of(error), problem_of(error))


async def answered(path: str, answer: Awaitable[T]) -> T | Response:
    """The answer, or the response to the error that it raises; one that is a bug is logged."""
    try:
        return await answer
    except Exception as exc:
        if not isinstance(exc, (ClientError, EngineError, RequestAborted)):
            logger.exception("the handler of %s crashed", path)
        return error_response(exc)


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _bad(status: int, code: str, message: str) -> BadRequest:
    return BadRequest(problem_response(status, Problem(INVALID_REQUEST, code, message)))


class HttpConnection:
    """One accepted connection until it closes, or becomes a WebSocket.

    `seen` holds the bytes that were read since the beginning of the latest request; `status` and `problem` are those of
    the response to it, once one was sent. Every response has the `common_headers`, too, until the next request.
    """

    def __init__(self, stream: trio.abc.Stream, limits: ConnectionLimits) -> None:
        self._stream = stream
        self._sender = Sender(stream)
        self._limits = limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.max_header_size)
        self.seen = b""
        self._is_chunked = False  # the latest request's body
        self._num_received = 0  # bytes, since the beginning of the latest body
        self._latest = b""  # of these, those received last, and a few before them
        self.is_new = True  # no request was read yet
        self._head_only = False  # the latest request is HEAD: its response has no body
        self.status: int | None = None
        self.problem: Problem | None = None
        self.common_headers: tuple[tuple[bytes, bytes], ...] = ()

    async def begun(self) -> bool:
        """Wait for the first bytes of the next request; False when the client has no more."""
        self.seen = self._h11.trailing_data[0]
        if not self.seen:
            with suppress(trio.BrokenResourceError):  # a reset between two requests cuts nothing off
                self.seen = bytes(await self._stream.receive_some(CHUNK))
            if self.seen:
                self._h11.receive_data(self.seen)
        return bool(self.seen)

    async def next_head(self) -> Request | None:
        """The next request without its body; None when the client has no more. Raises BadRequest."""
        self.is_new = self._head_only = False
        self.status, self.problem, self.common_headers = None, None, ()
        event = await self._next_event(self._limits.max_header_size + CHUNK)
        if not isinstance(event, h11.Request):
            return None
        self._head_only = event.method == b"HEAD"
        ahead = len(self._h11.trailing_data[0])
        head = self.seen[: len(self.seen) - ahead]
        if len(head) > self._limits.max_header_size:
            raise self._head_too_large()
        headers = tuple((bytes(name), bytes(value)) for name, value in event.headers)
        method, version = event.method.decode("ascii"), bytes(event.http_version)
        try:
            check_lines(head, version)
            path, query = split_target(bytes(event.target), check_headers(headers))
        except BadHead as exc:
            raise _bad(400, "bad_request", str(exc)) from None
        request = Request(method, path, query, headers, http_version=version)
        self._is_chunked = request.header(b"transfer-encoding") is not None
        if request.is_framed_twice:
            raise _bad(400, "bad_request", "the length of the body is given in two ways, or in one unknown to HTTP/1.0")
        return request

    async def read_body(self, max_size: int, held: Held) -> bytes:
        """The rest of the request. Raises BadRequest for more than so many bytes, or than `held` takes."""
        if self._h11.they_are_waiting_for_100_continue:
            await self._send(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        body = bytearray()
        self._latest = self._h11.trailing_data[0]
        self._num_received = len(self._latest)
        while isinstance(event := await self._next_event(0), h11.Data):
            if len(body) + len(event.data) > max_size:
                raise _bad(413, "body_too_large", f"the body is larger than {max_size} bytes")
            try:
                held.take(len(event.data))
            except OverBudget as exc:
                raise BadRequest(error_response(exc)) from None
            body += event.data
            if event.chunk_end:  # thousands of them may have come at once
                self._check_framing(len(body))
                await trio.lowlevel.checkpoint()
        self._check_end()
        return bytes(body)

    def _check_framing(self, size: int) -> None:
        """Each chunk costs a step of the parser, however little is in it. `size` is that of all, without framing."""
        most = MAX_FRAMING + size
        if self._num_received - size > most and self._num_received - size - len(self._h11.trailing_data[0]) > most:
            message = f"the framing of the body's chunks is larger than their content and {MAX_FRAMING} bytes"
            raise _bad(400, "chunks_too_small", message)

    def _check_end(self) -> None:
        """Another parser may look for the end of a chunked body beyond a bare line feed that h11 takes for it."""
        end = len(self._latest) - len(self._h11.trailing_data[0])
        if self._is_chunked and not self._latest[:end].endswith(END_OF_CHUNKS):
            raise _bad(400, "bad_request", "the body ends with a bare line feed")
        self._latest = b""

    async def _next_event(self, keep: int) -> Any:
        """h11's next event; up to about `keep` bytes of it are added to `seen`."""
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                data = bytes(await self._stream.receive_some(CHUNK))
                if len(self.seen) < keep:
                    self.seen += data
                self._num_received += len(data)
                self._latest = self._latest[-len(END_OF_CHUNKS) :] + data
                self._h11.receive_data(data)
        except h11.RemoteProtocolError as exc:
            status = exc.error_status_hint
            if status == 431:
                raise self._head_too_large() from exc
            if self._h11.trailing_data[1]:
                raise Disconnected("it closed the connection in the middle of a request") from exc
            raise _bad(status, "bad_request", fault_of(exc, self.seen)) from exc
        return event

    def _head_too_large(self) -> BadRequest:
        message = f"the header block is larger than {self._limits.max_header_size} bytes"
        return _bad(431, "head_too_large", message)

    async def exchange(self, request: Request, handler: Handler) -> bool:
        """Handle one request and send the response; True if another may follow.

        The handler, and what writes a stream, are cancelled when the client goes away (Disconnected) or sends too much
        ahead (BadRequest). Of the request nothing is kept while a stream is written.
        """
        path, is_sent = request.path, False
        async with trio.open_nursery() as nursery:
            body = Body(self._sender, nursery, self._limits.send_timeout)
            nursery.start_soon(self._watch, body)
            response: Response | StreamingResponse | None = await answered(path, handler(request))
            del request
            if isinstance(response, StreamingResponse):
                body.open(partial(self._first_frame, response), self._frame, response.keep_alive)
                nursery.start_soon(body.watch)
                response = await answered(path, response.write(body))
            if body.begun and response is None:
                await body.end(self._h11.send(h11.EndOfMessage()) or b"")
            elif not body.begun and response is not None:
                body.forgo()
                await self.respond(response)
            is_sent = True  # what is seen of the client from here on comes too late: it has its answer
            nursery.cancel_scope.cancel()
        if body.departed is not None and not is_sent:
            raise body.departed
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    async def _watch(self, body: Body) -> None:
        try:
            while data := bytes(await self._stream.receive_some(CHUNK)):
                self._h11.receive_data(data)
                if len(self._h11.trailing_data[0]) > MAX_PIPELINED:
                    message = f"more than {MAX_PIPELINED} bytes came while a request was handled"
                    body.depart(_bad(400, "pipelined_too_much", message))
                    return
        except trio.BrokenResourceError:
            pass
        body.depart(Disconnected("it closed the connection"))

    def _first_frame(self, response: StreamingResponse, piece: bytes) -> bytes:
        """The first piece of its body as bytes, after the head."""
        headers = [(b"content-type", response.content_type), *response.headers]
        return self._head(response.status, headers) + self._frame(piece)

    @property
    def _frame(self) -> Frame:
        """What makes bytes of each further piece; h11 takes ten times as long."""
        return _chunk if (self._h11.their_http_version or b"") >= b"1.1" else bytes

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        self.status = status
        reason = HTTPStatus(status).phrase.encode()
        head = h11.Response(status_code=status, headers=[*headers, *self.common_headers], reason=reason)
        return self._h11.send(head) or b""

    async def respond(self, response: Response) -> None:
        """Send a whole response to the latest request, in one piece. Raises Disconnected."""
        headers = [
            (b"content-type", response.content_type),
            (b"content-length", b"%d" % len(response.body)),
            *response.headers,
        ]
        head = self._head(response.status, headers)
        self.problem = response.problem
        body = () if self._head_only else (h11.Data(data=response.body),)
        events = (*body, h11.EndOfMessage())
        await self._send(head + b"".join(self._h11.send(event) or b"" for event in events))

    async def refuse(self, response: Response) -> None:
        """Send a response if none has begun; the connection is of no further use."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.respond(replace(response, headers=(*response.headers, (b"connection", b"close"))))

    async def _send(self, data: bytes) -> None:
        """In slices, each of which has its time: a client that reads slowly is no client that does not read."""
        for start in range(0, len(data), CHUNK):
            with trio.move_on_after(self._limits.send_timeout) as scope:
                try:
                    await self._stream.send_all(memoryview(data)[start : start + CHUNK])
                except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                    raise Disconnected("it closed the connection") from exc
            if scope.cancelled_caught:
                raise Disconnected("it does not read")


SINGLE = (b"host", b"origin", b"sec-websocket-key", b"sec-websocket-version")
_VERSIONS = (b"1.0", b"1.1")
_AUTHORITY = rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]*)(?::[0-9]{0,5})?"  # no user info
_HOST = re.compile(_AUTHORITY)
_ORIGIN = re.compile(rb"https?://(?=[^:])" + _AUTHORITY)
_PLAIN_ORIGIN = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://(?=[^:])" + _AUTHORITY)
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)
_TLS = b"\x16\x03"  # the first record of a handshake (RFC 8446, section 5.1)
_FAULTS = {  # of h11's messages, those that quote nothing of the client's, and in our words
    "Found multiple Host: headers": "the request has more than one Host header",
    "Missing mandatory Host: header": "the request has no Host header",
    "conflicting Content-Length headers": "the request has different values of Content-Length",
    "bad Content-Length": "the Content-Length is not a number",
}


class BadHead(Exception):
    """A head that is refused; its text is for the client."""


def fault_of(error: Exception, data: bytes) -> str:
    """Why h11 has refused a request, which begins with these bytes, in words for the client and the log."""
    if data.startswith(_TLS):
        return "the bytes are TLS, and this server speaks plain HTTP; TLS is for a proxy in front of it"
    return _FAULTS.get(str(error), "the bytes are not an HTTP/1.1 request")


def check_lines(head: bytes, version: bytes) -> None:
    """Raises BadHead for a bare line feed, a folded header, or a version other than 1.0 and 1.1."""
    if head.count(b"\n") != head.count(b"\r\n"):
        raise BadHead("a line of the head ends with a bare line feed")
    if b"\r\n " in head or b"\r\n\t" in head:
        raise BadHead("a header is folded over several lines")
    if version not in _VERSIONS:
        raise BadHead("the version must be HTTP/1.0 or HTTP/1.1")


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The Host, if there is one. Raises BadHead if it is malformed, or a header is repeated that must not be."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in SINGLE:
            if name in found:
                shown = name.decode().title().replace("Websocket", "WebSocket")
                raise BadHead(f"the request has more than one {shown} header")
            found[name] = value
    host = found.get(b"host")
    if host is not None and not _HOST.fullmatch(host):
        raise BadHead("the Host header must be a name or an address, and a port")
    return host


def split_target(target: bytes, host: bytes | None) -> tuple[str, str]:
    """Path and query of a request's target: a path, or a URL whose authority is the Host. Raises BadHead."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        authority, target = absolute.groups()
        if host is None or authority.lower() != host.lower():
            raise BadHead("the request's target is a URL whose host is not that of the Host header")
        target = target if target.startswith(b"/") else b"/" + target
    if not target.startswith(b"/"):
        raise BadHead("the request's target must be a path")
    if target.startswith(b"//"):
        raise BadHead("the path must begin with one slash")
    if b"#" in target:
        raise BadHead("the request's target has a fragment")
    path, _, query = target.decode("ascii").partition("?")
    return path, query


def name_of_host(host: bytes) -> str:
    """The name or address in a Host header, without its port and brackets; empty if it is malformed."""
    return _name(_HOST.fullmatch(host))


def name_of_origin(origin: bytes) -> str:
    """The same of an http or https Origin; empty if it is another one."""
    return _name(_ORIGIN.fullmatch(origin))


def is_plain_origin(origin: bytes) -> bool:
    """Whether it is a scheme, a name or address, and maybe a port."""
    return _PLAIN_ORIGIN.fullmatch(origin) is not None


def _name(match: re.Match[bytes] | None) -> str:
    return "" if match is None else match.group(1).decode().strip("[]")
