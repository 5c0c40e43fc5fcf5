"""HTTP/1.1 on one accepted connection: h11, limits on requests, and detection of the client's disconnect.

h11 parses requests and renders heads; bodies of responses are framed by hand, as h11 takes ten times as long. While a
request is handled, a task watches the connection: a disconnect, or too much sent ahead, cancels the handler.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

import h11
import trio

from trioengine.core.errors import EngineError
from trioengine.serve.body import CHUNK, Body, Disconnected, Sender
from trioengine.serve.config import ConnectionLimits
from trioengine.serve.errors import ClientError, OverBudget, Problem, RequestAborted
from trioengine.serve.http import (
    BadHead,
    BadRequest,
    Handler,
    HttpRequest,
    HttpResponse,
    StreamingResponse,
    check_headers,
    check_lines,
    describe_fault,
    error_response,
    header_lines,
    split_target,
)
from trioengine.serve.ids import http_date
from trioengine.serve.limits import Held

logger = logging.getLogger("trioengine")
T = TypeVar("T")
Waiting: TypeAlias = Callable[[], AbstractContextManager[object]]  # makes the context in which more bytes are awaited
MAX_PIPELINED = 64 << 10  # bytes that a client may send while its request is handled
MAX_FRAMING = 64 << 10  # bytes around the chunks of a request's body, beside as many as their content has
_END_OF_CHUNKS = b"\r\n\r\n"  # also behind trailers
_FRAMING = (b"connection", b"content-length", b"transfer-encoding")  # h11 gets these; it validates each five times


class HttpConnection:
    """One accepted connection until it closes, or becomes a WebSocket.

    `seen` holds the bytes read since the beginning of the latest request; `status` and `problem` describe the response
    to it, once one was sent. Until the next request every response also gets the `common_headers`.
    """

    def __init__(self, stream: trio.abc.Stream, limits: ConnectionLimits) -> None:
        self.seen = b""
        self.is_new = True  # no request was read yet
        self.status: int | None = None
        self.problem: Problem | None = None
        self.common_headers: tuple[tuple[bytes, bytes], ...] = ()
        self._stream = stream
        self._sender = Sender(stream)
        self._limits = limits
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.max_header_size)
        self._is_chunked = False  # the latest request's body
        self._num_received = 0  # bytes since the beginning of the latest body, framing included
        self._tail = b""  # the bytes received last, and a few before them
        self._head_only = False  # the latest request is HEAD: its response has no body

    # ---- requests -------------------------------------------------------------------------------------------------

    async def wait_for_request(self) -> bool:
        """Wait for the first bytes of the next request; False if the client has closed the connection."""
        self.seen = self._h11.trailing_data[0]
        if not self.seen:
            with suppress(trio.BrokenResourceError):  # a reset between two requests cuts nothing off
                self.seen = bytes(await self._stream.receive_some(CHUNK))
            if self.seen:
                self._h11.receive_data(self.seen)
        return bool(self.seen)

    async def next_head(self, waiting: Waiting) -> HttpRequest | None:
        """Read the next request without its body; None if the client has closed the connection. Raises BadRequest.

        `waiting` is entered only if the head has not come as a whole; its errors pass through.
        """
        self.is_new = self._head_only = False
        self.status, self.problem, self.common_headers = None, None, ()
        event = self._parsed()
        if event is h11.NEED_DATA:
            with waiting():
                while event is h11.NEED_DATA:
                    await self._receive(self._limits.max_header_size + CHUNK)
                    event = self._parsed()
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
            raise BadRequest.of(400, "bad_request", str(exc)) from None
        request = HttpRequest(method, path, query, headers, http_version=version)
        self._is_chunked = request.is_chunked
        if request.has_ambiguous_length:
            message = "the length of the body is given in two ways, or in one unknown to HTTP/1.0"
            raise BadRequest.of(400, "bad_request", message)
        return request

    async def read_body(self, max_size: int, held: Held, waiting: Waiting) -> bytes:
        """Read the rest of the request. Raises BadRequest beyond `max_size` bytes, or beyond the budget of `held`.

        `waiting` is entered only if the body has not come as a whole with the head; its errors pass through.
        """
        body = bytearray()
        self._tail = self._h11.trailing_data[0]
        self._num_received = len(self._tail)
        if not await self._take_body(body, max_size, held):
            with waiting():
                if self._h11.they_are_waiting_for_100_continue:
                    await self._send(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                await self._receive(0)
                while not await self._take_body(body, max_size, held):
                    await self._receive(0)
        self._check_end()
        return bytes(body)

    async def _take_body(self, body: bytearray, max_size: int, held: Held) -> bool:
        """Take the part of the body that was received; True at its end. Raises BadRequest."""
        while isinstance(event := self._parsed(), h11.Data):
            if len(body) + len(event.data) > max_size:
                raise BadRequest.of(413, "body_too_large", f"the body is larger than {max_size} bytes")
            try:
                held.take(len(event.data))
            except OverBudget as exc:
                raise BadRequest(error_response(exc)) from None
            body += event.data
            if event.chunk_end:  # thousands of them may have come at once
                self._check_framing(len(body))
                await trio.lowlevel.checkpoint()
        return event is not h11.NEED_DATA

    def _check_framing(self, size: int) -> None:
        """Raise BadRequest for many small chunks: each costs a step of the parser. `size` is without framing."""
        most = MAX_FRAMING + size
        if self._num_received - size > most and self._num_received - size - len(self._h11.trailing_data[0]) > most:
            message = f"the framing of the body's chunks is larger than their content and {MAX_FRAMING} bytes"
            raise BadRequest.of(400, "chunks_too_small", message)

    def _check_end(self) -> None:
        """Raise BadRequest if a chunked body ends with a bare line feed, which other parsers do not accept."""
        end = len(self._tail) - len(self._h11.trailing_data[0])
        if self._is_chunked and not self._tail[:end].endswith(_END_OF_CHUNKS):
            raise BadRequest.of(400, "bad_request", "the body ends with a bare line feed")
        self._tail = b""

    async def _receive(self, keep: int) -> None:
        """Read more bytes of the request; up to about `keep` bytes of it are added to `seen`."""
        data = bytes(await self._stream.receive_some(CHUNK))
        if len(self.seen) < keep:
            self.seen += data
        self._num_received += len(data)
        self._tail = self._tail[-len(_END_OF_CHUNKS) :] + data
        self._h11.receive_data(data)

    def _parsed(self) -> Any:
        """Return h11's next event, or NEED_DATA. Raises BadRequest, and Disconnected in the middle of a request."""
        try:
            return self._h11.next_event()
        except h11.RemoteProtocolError as exc:
            status = exc.error_status_hint
            if status == 431:
                raise self._head_too_large() from exc
            if self._h11.trailing_data[1]:
                raise Disconnected("it closed the connection in the middle of a request") from exc
            raise BadRequest.of(status, "bad_request", describe_fault(exc, self.seen)) from exc

    def _head_too_large(self) -> BadRequest:
        message = f"the header block is larger than {self._limits.max_header_size} bytes"
        return BadRequest.of(431, "head_too_large", message)

    # ---- responses ------------------------------------------------------------------------------------------------

    async def exchange(self, request: HttpRequest, handler: Handler) -> bool:
        """Handle one request and send the response; True if another request may follow.

        The handler, and the writer of a stream, are cancelled when the client disconnects (raises Disconnected) or
        sends too much ahead (raises BadRequest). While a stream is written nothing of the request is kept.
        """
        path, is_sent = request.path, False
        async with trio.open_nursery() as nursery:
            body = Body(self._sender, nursery, self._limits.send_timeout)
            nursery.start_soon(self._watch_client, body)
            response: HttpResponse | StreamingResponse | None = await _or_error_response(path, handler(request))
            del request
            if isinstance(response, StreamingResponse):
                frame = _chunk if (self._h11.their_http_version or b"") >= b"1.1" else bytes
                body.start(partial(self._stream_head, response), frame, response.keep_alive)
                nursery.start_soon(body.watch)
                response = await _or_error_response(path, response.write(body))
            if body.started and response is None:
                await body.end(self._h11.send(h11.EndOfMessage()) or b"")
            elif not body.started and response is not None:
                body.skip()
                await self.respond(response)
            is_sent = True  # from here on a disconnect comes too late: the client has its response
            nursery.cancel_scope.cancel()
        if body.disconnected is not None and not is_sent:
            raise body.disconnected
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    async def _watch_client(self, body: Body) -> None:
        try:
            while data := bytes(await self._stream.receive_some(CHUNK)):
                self._h11.receive_data(data)
                if len(self._h11.trailing_data[0]) > MAX_PIPELINED:
                    message = f"more than {MAX_PIPELINED} bytes came while a request was handled"
                    body.disconnect(BadRequest.of(400, "pipelined_too_much", message))
                    return
        except trio.BrokenResourceError:
            pass
        body.disconnect(Disconnected("it closed the connection"))

    def _stream_head(self, response: StreamingResponse) -> bytes:
        return self._head(response.status, [(b"content-type", response.content_type), *response.headers])

    def _head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        reason = HTTPStatus(status).phrase.encode()
        sent = [*headers, *self.common_headers, (b"date", http_date())]
        lines = header_lines([header for header in sent if header[0] not in _FRAMING])
        framing = [header for header in sent if header[0] in _FRAMING]
        head = self._h11.send(h11.Response(status_code=status, headers=framing, reason=reason)) or b""
        self.status = status
        return head[:-2] + lines + head[-2:]

    async def respond(self, response: HttpResponse) -> None:
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

    async def refuse(self, response: HttpResponse) -> None:
        """Send a response unless one has begun; the connection is of no further use."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self.respond(replace(response, headers=(*response.headers, (b"connection", b"close"))))

    async def _send(self, data: bytes) -> None:
        """Send in 64 KiB slices, each with its own timeout, so that slow readers are not treated as stalled."""
        for start in range(0, len(data), CHUNK):
            with trio.move_on_after(self._limits.send_timeout) as scope:
                try:
                    await self._stream.send_all(memoryview(data)[start : start + CHUNK])
                except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                    raise Disconnected("it closed the connection") from exc
            if scope.cancelled_caught:
                raise Disconnected("it does not read")


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


async def _or_error_response(path: str, response: Awaitable[T]) -> T | HttpResponse:
    """Await a response; of an error return the response that describes it, and log one that is a bug."""
    try:
        return await response
    except Exception as exc:
        if not isinstance(exc, (ClientError, EngineError, RequestAborted)):
            logger.exception("the handler of %s crashed", path)
        return error_response(exc)
