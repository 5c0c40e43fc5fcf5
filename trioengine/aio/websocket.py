"""A client's WebSocket over any stream: one task reads, one writes, and sending is synchronous."""

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

from trioengine.aio.concurrency import Notifier

MAX_MESSAGE = 64 << 20  # characters
MAX_REFUSAL = 1 << 20  # bytes of the body
ABNORMAL, BAD_DATA, TOO_BIG = 1006, 1003, 1009


class Rejected(Exception):
    """The server refused the handshake by an HTTP response."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body


class Closed(Exception):
    """The server closed the connection, or it broke (1006)."""

    def __init__(self, code: int, reason: str | None = None) -> None:
        super().__init__(f"closed with {code}" + (f": {reason}" if reason else ""))
        self.code = code
        self.reason = reason


class WebSocket:
    """Call `shake_hands`, then `read` in one task and `write` in another. The stream is left open."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._events: deque[Event] = deque()
        self._unsent: deque[bytes] = deque()
        self._unsent_changed = Notifier()
        self._pong = trio.Event()

    async def shake_hands(self, host: str, target: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the handshake, and wait until the server accepts it. Raises Rejected or Closed."""
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
        """Receive the next text, and answer pings before it. Raises Closed."""
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
                        self._unsent_changed.notify()
                    raise Closed(event.code, event.reason)
                case _:
                    raise Closed(BAD_DATA, f"the server sent a {type(event).__name__}")

    def send(self, text: str) -> None:
        """Send a text after all earlier messages; ignored after `close`."""
        self._put(TextMessage(text))

    def close(self) -> None:
        """Send a close frame after all earlier messages."""
        self._put(CloseConnection(code=1000))

    async def write(self) -> None:
        """Write messages until cancelled. Returns when the stream breaks; `read` raises Closed then."""
        while True:
            while not self._unsent:
                await self._unsent_changed.wait()
            try:
                await self._stream.send_all(self._unsent[0])
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._unsent.clear()
                self._unsent_changed.notify()
                return
            self._unsent.popleft()
            self._unsent_changed.notify()

    async def flushed(self) -> None:
        """Wait until all messages are written."""
        while self._unsent:
            await self._unsent_changed.wait()

    async def ping(self) -> None:
        """Send a ping, and wait for the pong."""
        self._pong = trio.Event()
        self._put(Ping())
        await self._pong.wait()

    def _put(self, event: Event) -> None:
        if self._protocol.state is ConnectionState.OPEN:
            self._unsent.append(self._protocol.send(event))
            self._unsent_changed.notify()

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
