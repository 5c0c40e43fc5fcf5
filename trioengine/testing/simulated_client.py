"""A WebSocket client without a socket: a real protocol, on two wires that are moved by hand, and the ways to vanish."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio
from trio.testing import MemoryReceiveStream
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from trioengine.testing.wire import Wire, WireEnd

PORTION, BUFFERED = 512, 1024  # bytes that a write moves at once, and that lie between the two

OnEvent = Callable[[dict[str, Any]], None]


class Mood(enum.Enum):
    """What a client does with its time."""

    WELL = "well"
    STALLED = "stalled"  # it reads nothing, and still sends
    VANISHED = "vanished"  # without a word: nothing arrives on either side
    GONE = "gone"  # its connection is closed, or was reset


class SimulatedClient:
    """`stream` is the server's end of its connection; `on_event` gets every event that the server sends."""

    def __init__(self, target: str, on_event: OnEvent) -> None:
        self.stream = _ServerEnd(self)
        self.to_server = Wire(self._reach_server, BUFFERED, by_hand=True)
        self.to_client = Wire(self._arrive, BUFFERED, by_hand=True)
        self.mood = Mood.WELL
        self.accepted = False
        self.was_reset = False
        self._on_event = on_event
        self._inbox = self.stream.inbox
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._unsent: list[str] = []  # until the server has accepted the connection
        self._text = ""
        self.to_server.put(self._protocol.send(Request(host="localhost", target=target)))

    # ---- what it says ---------------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether it has a connection to send on, or is about to have one."""
        state = self._protocol.state
        return self.mood in (Mood.WELL, Mood.STALLED) and state in (ConnectionState.CONNECTING, ConnectionState.OPEN)

    def send(self, text: str) -> None:
        """A message; many may be on their way."""
        if self.accepted:
            self.to_server.put(self._protocol.send(TextMessage(text)))
        else:
            self._unsent.append(text)

    def ping(self) -> None:
        if self.accepted:
            self.to_server.put(self._protocol.send(Ping()))

    def close(self) -> None:
        """Say goodbye; it is over when the server has answered."""
        if self.can_send and self.accepted:
            self.mood = Mood.WELL
            self.to_server.put(self._protocol.send(CloseConnection(code=1000)))
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection without a goodbye; what is on its way to the server still arrives."""
        if self.mood in (Mood.WELL, Mood.STALLED):
            self.to_server.move()
            self._inbox.put_eof()
            self._leave()

    def reset(self) -> None:
        """The connection breaks at once, for both sides."""
        self.was_reset = True
        self.to_server.cut()
        self._inbox.put_eof()
        self._leave()

    def refuse(self) -> None:
        """Nobody has accepted its connection, and nobody will."""
        self.stream.closed = True
        self.reset()

    def vanish(self) -> None:
        """As when a cable is pulled: neither side is told."""
        if self.mood is not Mood.GONE:
            self.mood = Mood.VANISHED

    def _leave(self) -> None:
        self.mood = Mood.GONE
        self.to_client.cut()

    def on_goodbye(self, code: int) -> None:
        """The server closes the connection."""

    # ---- bytes ----------------------------------------------------------------------------------------------------

    @property
    def moves(self) -> bool:
        """Whether there are bytes that would arrive."""
        to_server = self.mood in (Mood.WELL, Mood.STALLED) and len(self.to_server) > 0
        return to_server or (self.mood is Mood.WELL and (len(self.to_client) > 0 or self.stream.is_over))

    def carry(self, *, to_server: int | None, to_client: int | None) -> None:
        """Let so many bytes arrive, or all (None)."""
        if self.mood in (Mood.WELL, Mood.STALLED):
            self.to_server.move(to_server)
        if self.mood is Mood.WELL:
            self.to_client.move(to_client)
            if self.stream.is_over and not self.to_client:
                self.hang_up()  # it has read the end

    def _reach_server(self, data: bytes) -> None:
        if not self.stream.closed:
            self._inbox.put_data(data)

    def _arrive(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        for event in self._protocol.events():
            match event:
                case AcceptConnection():
                    self.accepted = True
                    for text in self._unsent:
                        self.send(text)
                case TextMessage():
                    self._text += event.data
                    if event.message_finished:
                        text, self._text = self._text, ""
                        self._on_event(json.loads(text))
                case Ping() if self._protocol.state is ConnectionState.OPEN:
                    self.to_server.put(self._protocol.send(event.response()))
                case CloseConnection() if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                    self.on_goodbye(event.code)
                    self.to_server.put(self._protocol.send(event.response()))
                case Ping() | CloseConnection() | Pong() | RejectConnection() | RejectData():
                    pass
                case _:
                    raise AssertionError(f"the server sent {event!r}")


class _ServerEnd(trio.abc.HalfCloseableStream):
    """What the server reads from and writes to."""

    def __init__(self, client: SimulatedClient) -> None:
        self.inbox = MemoryReceiveStream()
        self.closed = False
        self.is_over = False  # nothing more will be written
        self._client = client

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self.inbox.receive_some(max_bytes)
        if self._client.was_reset:
            raise trio.BrokenResourceError("connection reset by peer")
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_over:
            raise trio.ClosedResourceError("this end was closed")
        await WireEnd(self._client.to_client, PORTION, self._broken).send_all(data)

    def _broken(self) -> str | None:
        return "connection reset by peer" if self._client.mood is Mood.GONE else None

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        self.is_over = True
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.is_over = self.closed = True
        self.inbox.close()
        await trio.lowlevel.checkpoint()


class SimulatedListener(trio.abc.Listener[trio.abc.Stream]):
    """Where simulated clients connect; those not accepted when it is closed are reset."""

    def __init__(self) -> None:
        self._connect, self._accept = trio.open_memory_channel[SimulatedClient](128)

    def connect(self, client: SimulatedClient) -> None:
        """Its connection waits to be accepted."""
        try:
            self._connect.send_nowait(client)
        except trio.BrokenResourceError:
            client.refuse()

    async def accept(self) -> trio.abc.Stream:
        return (await self._accept.receive()).stream

    async def aclose(self) -> None:
        with suppress(trio.WouldBlock):
            while True:
                self._accept.receive_nowait().refuse()
        await self._accept.aclose()
