"""Clients without a socket: two wires that are moved by hand, the ways to vanish, and a WebSocket client."""

from __future__ import annotations

import abc
import enum
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio
from trio.testing import MemoryReceiveStream
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import CloseConnection, Ping, Pong, TextMessage

from trioengine.serve.body import Bytes
from trioengine.testing.simulated_process import Wire, WireEnd

PORTION, BUFFERED = 512, 1024  # bytes that a write moves at once, and that lie between the two


class PeerState(enum.Enum):
    """The behaviour of a client."""

    WELL = "well"
    STALLED = "stalled"  # it reads nothing, and still sends
    LISTENING = "listening"  # it has closed its side, and still reads
    VANISHED = "vanished"  # without a word: nothing arrives on either side
    GONE = "gone"  # its connection is closed, or was reset


_SENDING = (PeerState.WELL, PeerState.STALLED)
_READING = (PeerState.WELL, PeerState.LISTENING)


class SimulatedPeer(abc.ABC):
    """`stream` is the server's end of its connection. A subclass speaks a protocol."""

    def __init__(self) -> None:
        self.stream = _ServerEnd(self)
        self.to_server = Wire(self._reach_server, BUFFERED, by_hand=True)
        self.to_client = Wire(self._reach_client, BUFFERED, by_hand=True)
        self.name = "a client"
        self.peer_state = PeerState.WELL
        self.was_reset = False
        self.has_read_end = False  # nothing more will come from the server
        self.on_bytes: list[Callable[[str, bytes], None]] = []  # called with "->" or "<-", as bytes arrive
        self._inbox = self.stream.inbox

    def __repr__(self) -> str:
        return self.name

    # ---- the protocol -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _arrive(self, data: bytes) -> None:
        """Bytes of the server's."""

    @property
    @abc.abstractmethod
    def can_send(self) -> bool:
        """Whether it has a connection to send on, or is about to have one."""

    @property
    @abc.abstractmethod
    def is_active(self) -> bool:
        """Whether an answer of its is in progress."""

    @abc.abstractmethod
    def send_garbage(self) -> None:
        """Send bytes that violate the protocol."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave as the protocol wants it."""

    @abc.abstractmethod
    def check_at_rest(self) -> None:
        """Nothing moves: raise AssertionError unless it has all answers that it must have."""

    # ---- how it leaves --------------------------------------------------------------------------------------------

    @property
    def is_there(self) -> bool:
        """Whether its bytes reach the server."""
        return self.peer_state in _SENDING

    def hang_up(self) -> None:
        """Close the connection without a goodbye; bytes on their way to the server still arrive."""
        self.half_close()
        if self.peer_state is PeerState.LISTENING:
            self._leave()

    def half_close(self) -> None:
        """Say that nothing more comes, and go on reading."""
        if self.is_there:
            self.to_server.move()
            self._inbox.put_eof()
            self.peer_state = PeerState.LISTENING

    def reset(self) -> None:
        """The connection breaks at once, for both sides."""
        self.was_reset = True
        self.to_server.cut()
        self._inbox.put_eof()
        self._leave()

    def refuse(self) -> None:
        """Reset a connection that was never accepted."""
        self.stream.closed = True
        self.reset()

    def vanish(self) -> None:
        """Vanish as when a cable is pulled: neither side gets a signal."""
        if self.peer_state is not PeerState.GONE:
            self.peer_state = PeerState.VANISHED

    def _leave(self) -> None:
        self.peer_state = PeerState.GONE
        self.to_client.cut()

    # ---- bytes ----------------------------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """Whether it reads arriving bytes."""
        return self.peer_state in _READING

    @property
    def moves(self) -> bool:
        """Whether there are bytes that would arrive."""
        to_server = self.is_there and len(self.to_server) > 0
        is_end_due = self.stream.is_over and not self.has_read_end
        return to_server or (self.reads and (len(self.to_client) > 0 or is_end_due))

    def carry(self, *, to_server: int | None, to_client: int | None) -> None:
        """Let so many bytes arrive, or all (None)."""
        if self.is_there:
            self.to_server.move(to_server)
        if self.reads:
            self.to_client.move(to_client)
            if self.stream.is_over and not self.to_client and not self.has_read_end:
                self.has_read_end = True
                self.on_end()

    def on_end(self) -> None:
        """It has read the end of the server's bytes."""
        self.hang_up()

    def _reach_server(self, data: bytes) -> None:
        if not self.stream.closed:
            self._note("->", data)
            self._inbox.put_data(data)

    def _reach_client(self, data: bytes) -> None:
        self._note("<-", data)
        try:
            self._arrive(data)
        except AssertionError:
            raise
        except Exception as exc:  # of a parser, or for want of a field
            raise AssertionError(f"a client cannot read the server's bytes: {type(exc).__name__}: {exc}") from exc

    def _note(self, direction: str, data: bytes) -> None:
        for note in self.on_bytes:
            note(direction, data)


class _ServerEnd(trio.abc.HalfCloseableStream):
    """The server's end of the connection."""

    def __init__(self, peer: SimulatedPeer) -> None:
        self.inbox = MemoryReceiveStream()
        self.closed = False
        self.is_over = False  # nothing more will be written
        self._peer = peer

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self.inbox.receive_some(max_bytes)
        if self._peer.was_reset:
            raise trio.BrokenResourceError("connection reset by peer")
        return data

    async def send_all(self, data: Bytes) -> None:
        if self.is_over:
            raise trio.ClosedResourceError("this end was closed")
        await WireEnd(self._peer.to_client, PORTION, self._broken).send_all(data)

    def send_now(self, data: Bytes) -> int:
        """Like a socket: take at once the bytes that fit, and none where it is broken; return how many."""
        wire = self._peer.to_client
        if self.is_over or self._broken() is not None:
            return 0
        room = max(0, BUFFERED - len(wire))
        wire.put(bytes(data[:room]))
        return min(room, len(data))

    def _broken(self) -> str | None:
        return "connection reset by peer" if self._peer.peer_state is PeerState.GONE else None

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        self.is_over = True
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        if self.closed:  # by its owner, before trio closes it by force: a Cancelled that is swallowed costs time
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        self.is_over = self.closed = True
        self.inbox.close()
        await trio.lowlevel.checkpoint()


class SimulatedListener(trio.abc.Listener[trio.abc.Stream]):
    """Where simulated peers connect; those not accepted when it is closed are reset."""

    def __init__(self) -> None:
        self._connect, self._accept = trio.open_memory_channel[SimulatedPeer](128)

    def connect(self, peer: SimulatedPeer) -> None:
        """Its connection waits to be accepted."""
        try:
            self._connect.send_nowait(peer)
        except trio.BrokenResourceError:
            peer.refuse()

    async def accept(self) -> trio.abc.Stream:
        return (await self._accept.receive()).stream

    async def aclose(self) -> None:
        with suppress(trio.WouldBlock, trio.ClosedResourceError):
            while True:
                self._accept.receive_nowait().refuse()
        await self._accept.aclose()


OnEvent = Callable[[dict[str, Any]], None]
HANDSHAKE = (
    "GET {target} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
ACCEPTED, ACCEPTED_KEY = b"HTTP/1.1 101 ", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # for this key, which is RFC 6455's example


class SimulatedClient(SimulatedPeer):
    """`on_event` gets every event that the server sends."""

    def __init__(self, target: str, on_event: OnEvent) -> None:
        super().__init__()
        self.accepted = False
        self._on_event = on_event
        self._refused = False
        self._head = b""  # of the server's answer to the handshake
        self._protocol = Connection(ConnectionType.CLIENT)  # after the handshake
        self._unsent: list[str] = []  # until the server has accepted the connection
        self._text = ""
        self.to_server.put(HANDSHAKE.format(target=target).encode())

    # ---- messages of the client -------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        return self.is_there and not self._refused and self._protocol.state is ConnectionState.OPEN

    def send(self, text: str) -> None:
        """A message; many may be on their way."""
        if self.accepted:
            self.to_server.put(self._protocol.send(TextMessage(text)))
        else:
            self._unsent.append(text)

    def ping(self) -> None:
        if self.accepted:
            self.to_server.put(self._protocol.send(Ping()))

    def send_garbage(self) -> None:
        self.to_server.put(b"\xff" * 8)

    def close(self) -> None:
        """Say goodbye; it is over when the server has answered."""
        if self.can_send and self.accepted:
            self.peer_state = PeerState.WELL
            self.to_server.put(self._protocol.send(CloseConnection(code=1000)))
        else:
            self.hang_up()

    def on_goodbye(self, code: int, reason: str) -> None:
        """The server closes the connection."""

    def on_closed(self, code: int) -> None:
        """The server has answered a close, or has sent one of its own with another code, which crossed it."""

    def on_accepted(self) -> None:
        """The server has accepted the handshake."""

    def on_refusal(self, status: int, body: bytes) -> None:
        """The server has refused the handshake."""

    def _arrive(self, data: bytes) -> None:
        if not self.accepted:
            data = self._shake_hands(data)
        self._protocol.receive_data(data)
        for event in self._protocol.events():
            match event:
                case TextMessage():
                    self._text += event.data
                    if event.message_finished:
                        text, self._text = self._text, ""
                        self._on_event(json.loads(text))
                case Ping() if self._protocol.state is ConnectionState.OPEN:
                    self.to_server.put(self._protocol.send(event.response()))
                case CloseConnection() if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                    self.on_goodbye(event.code, event.reason or "")
                    self.to_server.put(self._protocol.send(event.response()))
                case CloseConnection():
                    self.on_closed(event.code)
                case Ping() | Pong():
                    pass
                case _:
                    raise AssertionError(f"the server sent {event!r}")

    def _shake_hands(self, data: bytes) -> bytes:
        """Return the bytes after the server's answer, if that has come and does not refuse."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self.accepted = head.startswith(ACCEPTED)
        self._refused = not self.accepted
        if self._refused:
            self._read_refusal(head, rest)
            return b""
        assert ACCEPTED_KEY in head, f"the server accepted another handshake: {head!r}"
        self.on_accepted()
        for text in self._unsent:
            self.send(text)
        return rest

    def _read_refusal(self, head: bytes, body: bytes) -> None:
        lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
        length = next(int(value) for name, _, value in lines if name == b"content-length")
        if len(body) == length:
            self.on_refusal(int(head.split()[1]), body)
