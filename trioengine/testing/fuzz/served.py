"""A server and its clients: what the machines have in common that use the engine over the network."""

from __future__ import annotations

import functools
from typing import ClassVar, Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.core.errors import TransitionFailed
from trioengine.serve import connection
from trioengine.serve.config import ServeConfig
from trioengine.serve.limits import ByteBudget, ConnectionSlot
from trioengine.serve.server import Server
from trioengine.testing.fuzz.callers import Call
from trioengine.testing.fuzz.environment import STARTS, WORKER_OUTAGES, PicturesEnvironment
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.watching import CrashLog, noting, noting_refusals
from trioengine.testing.simulated_peer import Mood, SimulatedListener, SimulatedPeer

WHICH = st.sampled_from((0, 0, 1, 2))
WAYS = ("close", "hang up", "half-close", "reset", "stall", "vanish", "read again", "garbage")
MAX_CLIENTS = 2  # at once
ATTEMPTS = 6  # to wake in the end: a worker may be lost on the way
OUTAGES = ("abort all", *WORKER_OUTAGES, *STARTS, "abort all", "drain", "drain soon", "abort")


Client = TypeVar("Client", bound=SimulatedPeer)


class ServedEnvironment(PicturesEnvironment, Generic[Client]):
    """The clients' ways to leave, and what happens to the server."""

    max_buffered_bytes: ClassVar[int]  # so few that clients are sometimes refused for want of room
    max_buffered_bytes_with_pictures: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self._watch(connection, "logger", lambda _: CrashLog(self.loop.crashes))
        self._watch(ConnectionSlot, "displace", noting(functools.partial(self.rare.saw, "a connection makes room")))
        self.clients: list[Client] = []
        self.listener = SimulatedListener()
        config = ServeConfig(max_connections=MAX_CLIENTS, max_buffered_bytes=self.max_buffered_bytes)
        self.server = Server(self.engine, config)
        self._watch(ByteBudget, "check_room", noting_refusals(functools.partial(self.rare.saw, "the buffers are full")))
        self.server_call = Call("server", functools.partial(self.server.run, [self.listener]), ())
        self.loop.start_soon(self.server_call.run, name="server")

    @precondition(lambda self: self.targets)
    @recorded(which=WHICH, how=st.sampled_from(WAYS))
    def go(self, which: int, how: str) -> None:
        """A client leaves, in one of the ways to leave, or reads no more, until it reads again."""
        if how == "read again" and all(client.mood is not Mood.STALLED for client in self.targets):
            how = "stall"
        able = [client for client in self.targets if _can_go(client, how)]
        if not able:
            return
        client = pick(able, which)
        self.rare.saw(f"{how} while {'a response is active' if client.is_active else 'no response is active'}")
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
                client.mood = Mood.STALLED
            case "read again":
                client.mood = Mood.WELL
            case "garbage":
                client.babble()

    @precondition(lambda self: self.targets)
    @recorded(which=WHICH, to_server=st.integers(0, 400), to_client=st.integers(0, 400))
    def carry(self, which: int, to_server: int, to_client: int) -> None:
        """Bytes arrive at the server, and at the client."""
        pick(self.targets, which).carry(to_server=to_server, to_client=to_client)

    @precondition(lambda self: self.in_use)
    @recorded(way=st.sampled_from(OUTAGES))
    def outage(self, way: str) -> None:
        """The server is told to end, or everything to stop, or the worker goes wrong."""
        match way:
            case "abort":
                self._excuse_shutdown()
                self.server.abort()
            case "drain" | "drain soon":
                self._begin_drain(self.server.drain, None if way == "drain" else 0.5)
            case _:
                self._suffer(way)

    # ---- what the environment asks --------------------------------------------------------------------------------

    def _make_room(self) -> None:
        self.server.budget._max_bytes = self.max_buffered_bytes_with_pictures

    @property
    def _num_asleep(self) -> int:
        """How many requests wait for a wake."""
        return self.engine.gate.ledger.suspended if self.engine.power.asleep else 0

    @property
    def in_use(self) -> bool:
        return bool(self.clients)

    @property
    def present(self) -> list[Client]:
        """Those that the server may still hold for connected."""
        return [client for client in self.clients if not client.stream.closed]

    @property
    def may_connect(self) -> bool:
        """Whether there are no more than one too many; the cheap look comes first, as it is asked before every rule."""
        return len(self.clients) <= MAX_CLIENTS or len(self.present) <= MAX_CLIENTS

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
        latest_first = [client for client in self.clients[::-1] if client.mood is not Mood.GONE]
        if len(latest_first) > 1:  # asked for before every rule, by preconditions
            latest_first.sort(key=lambda client: not client.is_active)
        return latest_first

    def _join(self, client: Client) -> None:
        self.clients.append(client)
        self.listener.connect(client)

    def _move(self) -> bool:
        moved = super()._move()
        for client in self.clients:
            if client.moves:
                moved = True
                client.carry(to_server=None, to_client=None)
        return moved

    def _check(self) -> None:
        super()._check()
        if not len(self.engine.payloads.line):  # else an event waits for room for its images
            for client in self.clients:
                client.check_at_rest()

    def _wake_up(self) -> None:
        """Asleep, nothing is said to a client that has vanished, by which it could be noticed."""
        for _ in range(ATTEMPTS):
            self._run_out(lambda: not self.engine.gate.num_pending, "a sleep is never done")
            if not self.engine.power.asleep or self.troubles.closing:
                return
            self._call("wake", self.engine.wake, (TransitionFailed,))
            self._run_out(lambda: self.calls[-1].over, "a wake is never done")

    def _let_go(self) -> None:
        for client in self.clients:
            client.close()
        present = [client for client in self.clients if client.mood is not Mood.VANISHED]
        self._run_out(lambda: all(client.stream.closed for client in present), "connections never end")
        self._wake_up()
        self._run_out(lambda: all(client.stream.closed for client in self.clients), "connections never end")
        for slots in (self.server.connections._slots, self.server.connections._beyond):
            assert slots.left == slots.count, f"all clients have gone, and {slots.left} of {slots.count} are free"
        kept = self.server.budget.num_bytes
        assert kept == 0, f"all clients have gone, and {kept} bytes are kept for them"
        known = len(self.server.in_flight)
        assert known == 0, f"all clients have gone, and {known} requests are known by their ids"
        left = [session for session in self.engine._sessions if session.end_cause is None]
        assert not left, f"sessions without a client: {left}"
        self._begin_drain(self.server.drain, 0.5)
        self._run_out(lambda: self.server_call.over and not self.running_calls, "the server does not end")


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
            return client.mood is Mood.WELL
        case "read again":
            return client.mood is Mood.STALLED
        case _:
            return client.mood is not Mood.VANISHED
