"""HTTP/1.1 as a client: one request a connection, its response read piece by piece.

One-shot commands and the benchmark use it. It is h11 on a trio stream: a streamed piece costs half of its cost with
httpx, on cores that the measured server needs (decision 013).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import h11
import trio

from trioengine.client.address import Address, Endpoint
from trioengine.core.errors import ConnectionLost

MAX_SMALL_BODY = 16 << 20  # bytes; a page of metrics, an error
UNAUTHORIZED = 401
_CHUNK = 1 << 16


class RequestError(Exception):
    """A request failed: the server refused it, went away, or sent an invalid response."""


class ClientResponse:
    """A response whose head has come; its body is read in pieces."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection, status: int) -> None:
        self.status = status
        self._stream = stream
        self._connection = connection

    async def receive_some(self) -> bytes:
        """Return the next piece, empty at the end. Raises RequestError if the response breaks off."""
        event = await _next_event(self._stream, self._connection)
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def read(self) -> bytes:
        """Return the whole of a small body. Raises RequestError if it exceeds MAX_SMALL_BODY."""
        body = b""
        while piece := await self.receive_some():
            body += piece
            if len(body) > MAX_SMALL_BODY:
                raise RequestError(f"the response is longer than {MAX_SMALL_BODY} bytes")
        return body


def endpoint_at(url: str, key: str | None = None) -> Endpoint:
    """The server at an http(s) URL, with its key as a bearer token. Raises InvalidConfig for a bad URL."""
    address = Address.parse(url, None)
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    return Endpoint(address.authority, address.target, headers, address.dial)


@asynccontextmanager
async def connect(server: Endpoint) -> AsyncIterator[trio.abc.Stream]:
    """Open a connection; cancelled, it is closed at once.

    Raises RequestError if connecting fails, and for failures of the connection in the body of the block.
    """
    try:
        async with await server.dial() as stream:
            yield stream
    except ConnectionLost as exc:
        raise RequestError(str(exc)) from exc
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as exc:
        reason = exc if str(exc) else exc.__cause__  # trio's own error has no text for a failure of TLS
        raise RequestError(f"the connection to {server.authority} failed: {reason}") from exc


@asynccontextmanager
async def request(
    server: Endpoint,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    on_sent: Callable[[], None] = lambda: None,
) -> AsyncIterator[ClientResponse]:
    """Send a request, with a JSON body if one is given, and yield the response. Raises RequestError."""
    payload = b"" if body is None else json.dumps(body).encode()
    headers = [(b"host", server.authority.encode()), (b"accept", b"*/*"), (b"connection", b"close"), *server.headers]
    if body is not None:
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    connection = h11.Connection(h11.CLIENT)
    events = [h11.Request(method=method, target=path, headers=headers), h11.Data(data=payload), h11.EndOfMessage()]
    async with connect(server) as stream:
        await stream.send_all(b"".join(connection.send(event) or b"" for event in events))
        on_sent()
        while isinstance(event := await _next_event(stream, connection), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise RequestError("the server did not answer")
        yield ClientResponse(stream, connection, event.status_code)


async def fetch(server: Endpoint, method: str, path: str) -> tuple[int, bytes]:
    """Send a request without a body, and return the status and the small body of its response. Raises RequestError."""
    async with request(server, method, path) as response:
        return response.status, await response.read()


def describe_error(status: int, body: bytes) -> str:
    """The status and the message of an error response."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        is_html = body.lstrip().startswith(b"<")
        message = "" if is_html else body[:200].decode("utf-8", "replace").strip()
    return f"HTTP {status}" + (f": {message}" if message else "") + (" (--api-key)" if status == UNAUTHORIZED else "")


async def _next_event(stream: trio.abc.Stream, connection: h11.Connection) -> h11.Event:
    data: bytes | None = None
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            data = bytes(await stream.receive_some(_CHUNK))
            connection.receive_data(data)
    except h11.RemoteProtocolError as exc:
        if data == b"":
            raise RequestError("the server closed the connection before the end of its response") from exc
        raise RequestError(f"the server's response is not HTTP: {exc}") from exc
    if not isinstance(event, h11.Event):
        raise RequestError("the server switched to another protocol")
    return event
