"""Clients of a server on simulated streams: the ways in which they leave, and the bytes between the two."""

from __future__ import annotations

import functools
import zlib
from typing import Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.testing.fuzz.environment import Environment
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.simulated_peer import PeerState, SimulatedListener, SimulatedPeer

WHICH = st.sampled_from((0, 0, 1, 2))
WAYS = ("close", "hang up", "half-close", "reset", "stall", "vanish", "read again", "garbage")
Client = TypeVar("Client", bound=SimulatedPeer)


class PeersEnvironment(Environment, Generic[Client]):
    """The clients of a server that accepts connections from `listener`."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.listener = SimulatedListener()
        self._received = 0  # a checksum of all bytes that clients got

    @precondition(lambda self: self.targets)
    @recorded(which=WHICH, how=st.sampled_from(WAYS))
    def go(self, which: int, how: str) -> None:
        """A client leaves, in one of the ways to leave, or reads no more, until it reads again."""
        stalled = [client for client in self.targets if client.peer_state is PeerState.STALLED]
        if how == "read again" and not stalled:
            how = "stall"
        elif how == "stall" and any(client.is_active for client in stalled):
            how = "read again"  # while the response is active, which is rare
        able = [client for client in self.targets if _can_go(client, how)]
        if not able:
            return
        client = pick(able, which)
        self.coverage.saw(f"{how} while {'a response is active' if client.is_active else 'no response is active'}")
        match how:
            case "close":
                client.close()
            case "hang up":
                client.hang_up()
            case "half-close":
                client.half_close()
            case "reset":
                client.reset()
            case "vanish":
                client.vanish()
            case "stall":
                client.peer_state = PeerState.STALLED
            case "read again":
                client.peer_state = PeerState.WELL
            case "garbage":
                client.send_garbage()
        self._gone(client, how)

    def _gone(self, client: Client, how: str) -> None:
        """A client went in this way."""

    @precondition(lambda self: self.targets)
    @recorded(which=WHICH, to_server=st.integers(0, 400), to_client=st.integers(0, 400))
    def carry(self, which: int, to_server: int, to_client: int) -> None:
        """Bytes arrive at the server, and at the client."""
        pick(self.targets, which).carry(to_server=to_server, to_client=to_client)

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def present(self) -> list[Client]:
        """Those that the server may still hold for connected."""
        return [client for client in self.clients if not client.stream.closed]

    @property
    def speakers(self) -> list[Client]:
        """Those that can send."""
        return [client for client in self.targets if client.can_send]

    @property
    def has_speakers(self) -> bool:
        return any(client.can_send for client in self.clients)

    @property
    def targets(self) -> list[Client]:
        """The clients that have not gone: first those with an answer in progress, then the latest."""
        latest_first = [client for client in self.clients[::-1] if client.peer_state is not PeerState.GONE]
        if len(latest_first) > 1:  # asked for before every rule, by preconditions
            latest_first.sort(key=lambda client: not client.is_active)
        return latest_first

    # ---- overrides --------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        return bool(self.clients)

    @property
    def checksum(self) -> str:
        return f"{super().checksum}:{self._received:08x}"

    def _receive(self, direction: str, data: bytes) -> None:
        if direction == "<-":
            self._received = zlib.crc32(data, self._received)

    def _join(self, client: Client) -> None:
        client.name = f"client {len(self.clients) + 1}"
        client.on_bytes.append(self._receive)
        if self.trace is not None:
            client.on_bytes.append(functools.partial(self.trace.bytes_arrived, len(self.clients) + 1))
        self.clients.append(client)
        self.listener.connect(client)

    def _move(self, *, compiles: bool = True) -> bool:
        moved = super()._move(compiles=compiles)
        for client in self.clients:
            if client.moves:
                moved = True
                client.carry(to_server=None, to_client=None)
        return moved


def _can_go(client: SimulatedPeer, how: str) -> bool:
    """Whether this way changes anything for a client that has not gone."""
    match how:
        case "reset":
            return True
        case "half-close":
            return client.is_there
        case "garbage":
            return client.can_send
        case "stall":
            return client.peer_state is PeerState.WELL
        case "read again":
            return client.peer_state is PeerState.STALLED
        case _:
            return client.peer_state is not PeerState.VANISHED
