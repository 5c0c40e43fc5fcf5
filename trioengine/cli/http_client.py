"""HTTP/1.1 as a client: one request a connection, its answer read piece by piece.

h11 on a trio stream: a streamed piece costs half of what it does with httpx, on cores that the server needs (decision
013).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11
import trio

from trioengine.client import address
from trioengine.core.errors import ConnectionLost

MAX_SMALL_BODY = 16 << 20  # bytes; a page of metrics, an error
UNAUTHORIZED = 401
_CHUNK = 1 << 16


class RequestFailed(Exception):
    """A request failed: the server refused it, went away, or said what is not understood."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server: how to connect to it, what it is called, and what it lets in."""

    open_stream: Callable[[], Awaitable[trio.abc.Stream]]
    host: str  # with the port, as in a URL
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Address:
        """Of a URL with http or https."""
        headers = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        server = address.Address.parse(url, None)
        return cls(server.dial, server.authority, headers)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[trio.abc.Stream]:
        """A connection; cancelled, it is closed at once. Raises RequestFailed, also for what breaks in the body."""
        try:
            async with await self.open_stream() as stream:
                yield stream
        except ConnectionLost as exc:
            raise RequestFailed(str(exc)) from exc
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            reason = exc if str(exc) else exc.__cause__  # trio's own says nothing of a TLS error
            raise RequestFailed(f"the connection to {self.host} failed: {reason}") from exc


class Response:
    """The head of an answer; its body is read in pieces."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection, status: int) -> None:
        self.status = status
        self._stream = stream
        self._connection = connection

    async def receive_some(self) -> bytes:
        """The next piece; empty at the end. Raises RequestFailed where the answer breaks off."""
        event = await _next_event(self._stream, self._connection)
        return bytes(event.data) if isinstance(event, h11.Data) else b""

    async def read(self) -> bytes:
        """All of a small body."""
        body = b""
        while piece := await self.receive_some():
            body += piece
            if len(body) > MAX_SMALL_BODY:
                raise RequestFailed(f"the answer is longer than {MAX_SMALL_BODY} bytes")
        return body


@asynccontextmanager
async def request(
    address: Address,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    on_sent: Callable[[], None] = lambda: None,
) -> AsyncIterator[Response]:
    """Send a request with a JSON body, or none; gives the head of its answer. Raises RequestFailed."""
    payload = b"" if body is None else json.dumps(body).encode()
    headers = [("host", address.host), ("accept", "*/*"), ("connection", "close"), *address.headers]
    if body is not None:
        headers += [("content-type", "application/json"), ("content-length", str(len(payload)))]
    connection = h11.Connection(h11.CLIENT)
    request = [h11.Request(method=method, target=path, headers=headers), h11.Data(data=payload), h11.EndOfMessage()]
    async with address.connect() as stream:
        await stream.send_all(b"".join(connection.send(event) or b"" for event in request))
        on_sent()
        while isinstance(event := await _next_event(stream, connection), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise RequestFailed("the server did not answer")
        yield Response(stream, connection, event.status_code)


def describe_error(status: int, body: bytes) -> str:
    """What the server says of an error, with its status."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = "" if body.lstrip().startswith(b"<") else body[:200].decode("utf-8", "replace").strip()  # HTML
    return f"HTTP {status}" + (f": {said}" if said else "") + (" (--api-key)" if status == UNAUTHORIZED else "")


async def _next_event(stream: trio.abc.Stream, connection: h11.Connection) -> h11.Event:
    data: bytes | None = None
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            data = bytes(await stream.receive_some(_CHUNK))
            connection.receive_data(data)
    except h11.RemoteProtocolError as exc:
        if data == b"":
            raise RequestFailed("the server closed the connection before the end of its answer") from exc
        raise RequestFailed(f"the server's answer is not HTTP: {exc}") from exc
    if not isinstance(event, h11.Event):
        raise RequestFailed("the server switched to another protocol")
    return event
