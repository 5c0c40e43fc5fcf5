"""The client's end of a WebSocket, over any stream: one task reads, one writes, and saying something is synchronous."""

from __future__ import annotations

from collections import deque

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError

from trioengine.aio.nursery import Notifier

MAX_MESSAGE = 64 << 20  # characters
MAX_REFUSAL = 1 << 20  # bytes
ABNORMAL, BAD_DATA, TOO_BIG = 1006, 1003, 1009


class Rejected(Exception):
    """The server answers the handshake by an HTTP response of its own."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body


class Closed(Exception):
    """The connection is over: the server said goodbye, or (1006) it broke."""

    def __init__(self, code: int, reason: str | None = None) -> None:
        super().__init__(f"closed with {code}" + (f": {reason}" if reason else ""))
        self.code = code
        self.reason = reason


class WebSocket:
    """`shake_hands`, then `read` in one task and `write` in another. It does not close the stream."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: deque[Event] = deque()
        self._unsent: deque[bytes] = deque()
        self._changes = Notifier()
        self._pong = trio.Event()

    async def shake_hands(self, host: str, target: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Raises Rejected or Closed."""
        request = Request(host=host, target=target, extra_headers=headers)
        try:
            await self._stream.send_all(self._protocol.send(request))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise Closed(ABNORMAL) from None
        status, body = 0, b""
        while True:
            match event := await self._next_event():
                case AcceptConnection():
                    return
                case RejectConnection():
                    status = event.status_code
                    if not event.has_body:
                        raise Rejected(status, body)
                case RejectData():
                    body += event.data
                    if event.body_finished or len(body) > MAX_REFUSAL:
                        raise Rejected(status, body)

    async def read(self) -> str:
        """The next text; pings are answered on the way. Raises Closed."""
        text = ""
        while True:
            match event := await self._next_event():
                case TextMessage():
                    text += event.data
                    if len(text) > MAX_MESSAGE:
                        raise Closed(TOO_BIG, f"a message of more than {MAX_MESSAGE} characters")
                    if event.message_finished:
                        return text
                case Ping():
                    self._put(event.response())
                case Pong():
                    self._pong.set()
                case CloseConnection():
                    if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                        self._unsent.append(self._protocol.send(event.response()))
                        self._changes.notify()
                    raise Closed(event.code, event.reason)
                case _:
                    raise Closed(BAD_DATA, f"the server sent a {type(event).__name__}")

    def send(self, text: str) -> None:
        """Say it when its turn has come; nothing is said after a goodbye."""
        self._put(TextMessage(text))

    def close(self) -> None:
        self._put(CloseConnection(code=1000))

    async def write(self) -> None:
        """Write what is said, until cancelled; returns when the stream breaks, which `read` tells."""
        while True:
            while not self._unsent:
                await self._changes.wait()
            try:
                await self._stream.send_all(self._unsent[0])
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._unsent.clear()
                self._changes.notify()
                return
            self._unsent.popleft()
            self._changes.notify()

    async def flushed(self) -> None:
        """Wait until everything is written."""
        while self._unsent:
            await self._changes.wait()

    async def ping(self) -> None:
        """Wait until the server answers."""
        self._pong = trio.Event()
        self._put(Ping())
        await self._pong.wait()

    def _put(self, event: Event) -> None:
        if self._protocol.state is ConnectionState.OPEN:
            self._unsent.append(self._protocol.send(event))
            self._changes.notify()

    async def _next_event(self) -> Event:
        while not self._events:
            try:
                data = await self._stream.receive_some()
                if not data:
                    raise Closed(ABNORMAL)
                self._protocol.receive_data(bytes(data))
                self._events.extend(self._protocol.events())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise Closed(ABNORMAL) from None
            except ProtocolError as exc:
                raise Closed(ABNORMAL, f"the server does not speak WebSocket: {exc}") from None
        return self._events.popleft()
