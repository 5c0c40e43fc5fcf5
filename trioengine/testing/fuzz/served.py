"""A server and its clients: base class of the machines that use the engine over the network."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.actors.generation import Generation
from trioengine.core.errors import TransitionFailed
from trioengine.serve.config import ServeConfig
from trioengine.serve.server import Server
from trioengine.testing.fuzz import inside, inside_payloads, inside_server
from trioengine.testing.fuzz.callers import Call
from trioengine.testing.fuzz.environment import STARTS, WORKER_OUTAGES, PicturesEnvironment
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.inside_server import RealtimeConnection, Response
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.world import EngineFactory, make_engine
from trioengine.testing.simulated_peer import PeerState, SimulatedListener, SimulatedPeer

WHICH = st.sampled_from((0, 0, 1, 2))
WAYS = ("close", "hang up", "half-close", "reset", "stall", "vanish", "read again", "garbage")
MAX_CLIENTS = 2  # at once
ATTEMPTS = 6  # to wake in the end: a worker may be lost on the way
OUTAGES = ("abort all", *WORKER_OUTAGES, *STARTS, "abort all", "drain", "drain soon", "abort")


ROOM, AT_ONCE = 1024, 512  # characters of an outbox, so that few events fill it, and not all of them go at once
Client = TypeVar("Client", bound=SimulatedPeer)


class ServerWatch(inside_server.ServerEvents):
    """Checks of one server at the moment of an event; complaints are added to `crashes`."""

    def __init__(self, crashes: list[Exception], saw: Callable[[str], None], faults: InjectedFaults) -> None:
        self.connections: list[RealtimeConnection] = []  # that are not over
        self._crashes = crashes
        self._saw = saw
        self._faults = faults
        self._cancelled: list[Response] = []  # by clients, and not over

    def error_logged(self, error: Exception) -> None:
        self._crashes.append(error)

    def connection_displaced(self) -> None:
        self._saw("a connection makes room")

    def bytes_refused(self) -> None:
        self._saw("the buffers are full")

    def aborted_by_id(self, generations: list[Generation], due: int, aborted: int) -> None:
        """Complain unless all that went on are stopped in the same step, and counted."""
        if aborted != due:
            self._complain(f"an operator got {aborted} for {generations}")
        for generation in filter(inside.is_going, generations):
            self._complain(f"an operator has aborted it, and it goes on: {inside.session_of(generation)}")
        if aborted:
            self._faults.strike(Harm.OPERATORS)
        self._saw("an operator aborts a request" if aborted else "an operator aborts a request that is over")

    def connection_opened(self, connection: RealtimeConnection) -> None:
        self.connections.append(connection)

    def connection_closed(self, connection: RealtimeConnection) -> None:
        self.connections.remove(connection)

    def response_cancelled(self, response: Response) -> None:
        """Complain unless the response is stopped in the same step."""
        self._cancelled.append(response)
        try:
            self.check_cancelled()
        except AssertionError as exc:
            self._crashes.append(exc)

    def message_dropped(self) -> None:
        self._saw("a message is dropped")

    def event_put(self, size: int) -> None:
        if size > ROOM:
            self._saw("an outbox is full")

    def delta_put(self, size: int) -> None:
        """Complain if texts for a slow client do not wait for room."""
        if size > ROOM + inside_server.BETWEEN:
            self._complain(f"{size} characters are kept for a slow client")

    def check_cancelled(self) -> None:
        """Responses that clients have cancelled do not go on; one on its way in is stopped once it is there."""
        self._cancelled = list(filter(inside_server.is_in_progress, self._cancelled))
        for response in self._cancelled:
            assert not inside_server.goes_on(response), f"{response.id} was cancelled, and goes on"

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))


class ServedEnvironment(PicturesEnvironment, Generic[Client]):
    """The ways in which clients leave, and faults of the server."""

    max_buffered_bytes: ClassVar[int]  # so few that clients are sometimes refused for want of room
    max_buffered_bytes_with_pictures: ClassVar[int]

    def __init__(self, make_engine: EngineFactory = make_engine) -> None:
        super().__init__(make_engine)
        self.clients: list[Client] = []
        self._received = 0  # a checksum of all bytes that clients got
        self.listener = SimulatedListener()
        config = ServeConfig(max_connections=MAX_CLIENTS, max_buffered_bytes=self.max_buffered_bytes)
        self.watch = ServerWatch(self.loop.crashes, self.coverage.saw, self.faults)
        self._taps.enter_context(inside_server.tapped(self.watch, room=ROOM, at_once=AT_ONCE))
        self.server = Server(self.engine, config)
        self.server_call = Call(Life(self.faults), "server", functools.partial(self.server.run, [self.listener]), ())
        self.loop.start_soon(self.server_call.run, name="server")

    @precondition(lambda self: self.targets)
    @recorded(which=WHICH, how=st.sampled_from(WAYS))
    def go(self, which: int, how: str) -> None:
        """A client leaves, in one of the ways to leave, or reads no more, until it reads again."""
        if how == "read again" and all(client.peer_state is not PeerState.STALLED for client in self.targets):
            how = "stall"
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

    @precondition(lambda self: self.targets)
    @recorded(which=WHICH, to_server=st.integers(0, 400), to_client=st.integers(0, 400))
    def carry(self, which: int, to_server: int, to_client: int) -> None:
        """Bytes arrive at the server, and at the client."""
        pick(self.targets, which).carry(to_server=to_server, to_client=to_client)

    @precondition(lambda self: self.in_use)
    @recorded(way=st.sampled_from(OUTAGES))
    def outage(self, way: str) -> None:
        """Drain or abort the server, abort all requests, or inject a fault into the worker."""
        match way:
            case "abort":
                self._excuse_shutdown()
                self.server.abort()
            case "drain" | "drain soon":
                self._begin_drain(self.server.drain, None if way == "drain" else 0.5)
            case _:
                self._suffer(way)

    # ---- overrides --------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        inside_server.set_max_buffered_bytes(self.server, self.max_buffered_bytes_with_pictures)

    @property
    def _num_asleep(self) -> int:
        """How many requests wait for a wake."""
        return inside.num_suspended(self.engine) if self.engine.power.asleep else 0

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
        latest_first = [client for client in self.clients[::-1] if client.peer_state is not PeerState.GONE]
        if len(latest_first) > 1:  # asked for before every rule, by preconditions
            latest_first.sort(key=lambda client: not client.is_active)
        return latest_first

    @property
    def checksum(self) -> str:
        return f"{super().checksum}:{self._received:08x}"

    def _receive(self, direction: str, data: bytes) -> None:
        if direction == "<-":
            self._received = zlib.crc32(data, self._received)

    def _join(self, client: Client) -> None:
        client.on_bytes.append(self._receive)
        if self.trace is not None:
            client.on_bytes.append(functools.partial(self.trace.bytes_arrived, len(self.clients) + 1))
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
        if not len(inside_payloads.budget(self.engine).line):  # else an event waits for room for its images
            for client in self.clients:
                client.check_at_rest()

    def _wake_up(self) -> None:
        """Wake the engine: asleep it sends nothing, so that it cannot detect a client that has vanished."""
        for _ in range(ATTEMPTS):
            self._run_out(lambda: not inside.is_change_pending(self.engine), "a sleep is never done")
            if not self.engine.power.asleep or self.faults.closing:
                return
            self._call("wake", self.engine.wake, (TransitionFailed,))
            self._run_out(lambda: self.calls[-1].over, "a wake is never done")

    def _let_go(self) -> None:
        for client in self.clients:
            client.close()
        present = [client for client in self.clients if client.peer_state is not PeerState.VANISHED]
        self._run_out(lambda: all(client.stream.closed for client in present), "connections never end")
        self._wake_up()
        self._run_out(lambda: all(client.stream.closed for client in self.clients), "connections never end")
        for count, left in inside_server.connection_slots(self.server):
            assert left == count, f"all clients have gone, and {left} of {count} are free"
        kept = inside_server.num_buffered_bytes(self.server)
        assert kept == 0, f"all clients have gone, and {kept} bytes are kept for them"
        known = len(inside_server.request_ids(self.server))
        assert known == 0, f"all clients have gone, and {known} requests are known by their ids"
        open_sessions = [session for session in inside.sessions(self.engine) if session.end_cause is None]
        assert not open_sessions, f"sessions without a client: {open_sessions}"
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
            return client.peer_state is PeerState.WELL
        case "read again":
            return client.peer_state is PeerState.STALLED
        case _:
            return client.peer_state is not PeerState.VANISHED
