"""A client's end of a connection without a socket: two wires that are moved by hand, and the ways to vanish."""

from __future__ import annotations

import abc
import enum
from contextlib import suppress

import trio
from trio.testing import MemoryReceiveStream

from trioengine.serve.body import Bytes
from trioengine.testing.wire import Wire, WireEnd

PORTION, BUFFERED = 512, 1024  # bytes that a write moves at once, and that lie between the two


class Mood(enum.Enum):
    """What a client does with its time."""

    WELL = "well"
    STALLED = "stalled"  # it reads nothing, and still sends
    LISTENING = "listening"  # it has closed its side, and still reads
    VANISHED = "vanished"  # without a word: nothing arrives on either side
    GONE = "gone"  # its connection is closed, or was reset


_SENDING = (Mood.WELL, Mood.STALLED)
_READING = (Mood.WELL, Mood.LISTENING)


class SimulatedPeer(abc.ABC):
    """`stream` is the server's end of its connection. A subclass speaks a protocol."""

    def __init__(self) -> None:
        self.stream = _ServerEnd(self)
        self.to_server = Wire(self._reach_server, BUFFERED, by_hand=True)
        self.to_client = Wire(self._arrive, BUFFERED, by_hand=True)
        self.mood = Mood.WELL
        self.was_reset = False
        self._inbox = self.stream.inbox

    # ---- what a protocol says -------------------------------------------------------------------------------------

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
    def babble(self) -> None:
        """Send what the protocol does not know."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave as the protocol wants it."""

    @abc.abstractmethod
    def check_at_rest(self) -> None:
        """Nothing moves: raise AssertionError unless it was told what it must be told."""

    # ---- how it leaves --------------------------------------------------------------------------------------------

    @property
    def is_there(self) -> bool:
        """Whether its bytes reach the server."""
        return self.mood in _SENDING

    def hang_up(self) -> None:
        """Close the connection without a goodbye; what is on its way to the server still arrives."""
        self.half_close()
        if self.mood is Mood.LISTENING:
            self._leave()

    def half_close(self) -> None:
        """Say that nothing more comes, and go on reading."""
        if self.is_there:
            self.to_server.move()
            self._inbox.put_eof()
            self.mood = Mood.LISTENING

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

    # ---- bytes ----------------------------------------------------------------------------------------------------

    @property
    def reads(self) -> bool:
        """Whether it reads what comes."""
        return self.mood in _READING

    @property
    def moves(self) -> bool:
        """Whether there are bytes that would arrive."""
        to_server = self.is_there and len(self.to_server) > 0
        return to_server or (self.reads and (len(self.to_client) > 0 or self.stream.is_over))

    def carry(self, *, to_server: int | None, to_client: int | None) -> None:
        """Let so many bytes arrive, or all (None)."""
        if self.is_there:
            self.to_server.move(to_server)
        if self.reads:
            self.to_client.move(to_client)
            if self.stream.is_over and not self.to_client:
                self.hang_up()  # it has read the end

    def _reach_server(self, data: bytes) -> None:
        if not self.stream.closed:
            self._inbox.put_data(data)


class _ServerEnd(trio.abc.HalfCloseableStream):
    """What the server reads from and writes to."""

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
        """As a socket: what there is room for is taken at once, and nothing where it is broken."""
        wire = self._peer.to_client
        if self.is_over or self._broken() is not None:
            return 0
        room = max(0, BUFFERED - len(wire))
        wire.put(bytes(data[:room]))
        return min(room, len(data))

    def _broken(self) -> str | None:
        return "connection reset by peer" if self._peer.mood is Mood.GONE else None

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
        with suppress(trio.WouldBlock):
            while True:
                self._accept.receive_nowait().refuse()
        await self._accept.aclose()
