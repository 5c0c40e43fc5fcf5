"""A client that is an async function: its end of a simulated connection is a stream."""

from __future__ import annotations

import math
from collections.abc import Callable

import trio
from trio.testing import MemoryReceiveStream

from trioengine.serve.body import Bytes
from trioengine.testing.simulated_peer import PORTION, PeerState, SimulatedPeer
from trioengine.testing.simulated_process import WireEnd

_OUT_OF_REACH = (PeerState.GONE, PeerState.VANISHED)


class MemoryPeer(SimulatedPeer):
    """`client_stream` is the client's end; `scope` is cancelled when the client has gone."""

    def __init__(self) -> None:
        super().__init__()
        self.scope = trio.CancelScope()
        self.client_stream = _ClientEnd(self)

    @property
    def can_send(self) -> bool:
        return self.is_there and not self.stream.closed

    @property
    def is_active(self) -> bool:
        return not self.scope.cancel_called

    def send_garbage(self) -> None:
        """Send bytes that no client sends, and leave: a client's function judges the answers to its own alone."""
        self.to_server.put(b"\xff" * 8 + b"\n")
        self.hang_up()

    def close(self) -> None:
        """Leave: bytes that are on their way to the server still arrive, and the client's function is cancelled."""
        self.hang_up()

    def check_at_rest(self) -> None:
        """The client's function judges its answers."""

    def hang_up(self) -> None:
        super().hang_up()
        if self.peer_state is not PeerState.GONE:
            self._leave()

    def vanish(self) -> None:
        super().vanish()
        self.scope.cancel()

    def on_end(self) -> None:
        self.client_stream.inbox.put_eof()

    def _leave(self) -> None:
        super()._leave()
        self.scope.cancel()

    def _arrive(self, data: bytes) -> None:
        self.client_stream.inbox.put_data(data)


class RemotePeer(MemoryPeer):
    """A connection of the client library, which, as a socket, is not cancelled when it breaks."""

    def __init__(self, is_active: Callable[[], bool]) -> None:
        super().__init__()
        self.client_stream = _LibraryEnd(self)
        self.is_harmed = False  # by a rule
        self.silent_since = math.inf  # since when nothing arrives at the client
        self._is_active = is_active

    @property
    def is_active(self) -> bool:
        return self._is_active()

    @property
    def is_over(self) -> bool:
        """Whether neither side has it."""
        return self.peer_state is PeerState.GONE and self.stream.closed

    def send_garbage(self) -> None:
        """Damage the bytes to the client."""
        self.to_client.put(b"\xff" * 8)

    def _leave(self) -> None:
        super()._leave()
        self.client_stream.inbox.put_eof()


class _ClientEnd(trio.abc.HalfCloseableStream):
    """The client's end: a write waits while the connection is full."""

    def __init__(self, peer: MemoryPeer) -> None:
        self.inbox = MemoryReceiveStream()
        self._peer = peer

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self.inbox.receive_some(max_bytes)

    async def send_all(self, data: Bytes) -> None:
        await WireEnd(self._peer.to_server, PORTION, self._broken).send_all(data)

    def _broken(self) -> str | None:
        return None if self._peer.can_send else "the connection is closed"

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        self._peer.half_close()
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        if self._peer.peer_state not in _OUT_OF_REACH:
            self._peer.hang_up()
        await trio.lowlevel.checkpoint()


class _LibraryEnd(_ClientEnd):
    """The same; it is reset with the connection, and writes into the void if that has vanished."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await super().receive_some(max_bytes)
        if self._peer.was_reset:
            raise trio.BrokenResourceError("connection reset by peer")
        return data

    def _broken(self) -> str | None:
        return None if self._peer.peer_state is PeerState.VANISHED else super()._broken()
