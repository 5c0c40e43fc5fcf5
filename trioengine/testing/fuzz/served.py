"""A server and its clients: base class of the machines that use the engine over the network."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import trio
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.actors.generation import Generation
from trioengine.core.errors import TransitionFailed
from trioengine.serve.config import ServeConfig
from trioengine.serve.realtime.connection import CLOSE_TIMEOUT
from trioengine.serve.server import ABORT_TIMEOUT, Server
from trioengine.testing.fuzz import inside, inside_client, inside_payloads, inside_server
from trioengine.testing.fuzz.callers import Call
from trioengine.testing.fuzz.environment import STARTS, WORKER_OUTAGES, PicturesEnvironment, Switch
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.inside_server import RealtimeConnection, Response
from trioengine.testing.fuzz.peers import Client, PeersEnvironment
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.request_log import AdmissionLog, RequestLog
from trioengine.testing.fuzz.world import VARIANTS
from trioengine.testing.simulated_peer import PeerState
from trioengine.testing.simulated_worker import Health
from trioengine.testing.toy_weights import TOY_PATH

MAX_CLIENTS = 2  # at once
OUTAGES = ("abort all", *WORKER_OUTAGES, *STARTS, "abort all", "drain", "drain soon", "abort")


ROOM, AT_ONCE = 1024, 512  # characters of an outbox, so that few events fill it, and not all of them go at once
KEPT = 8000  # characters of events that are kept for a client that was lost


class ServerWatch(inside_server.ServerEvents):
    """Checks of one server at the moment of an event; complaints are added to `crashes`."""

    def __init__(
        self,
        crashes: list[Exception],
        saw: Callable[[str], None],
        faults: InjectedFaults,
        requests: RequestLog,
        admissions: AdmissionLog,
    ) -> None:
        self.connections: list[RealtimeConnection] = []  # that are not over
        self.events: defaultdict[str, list[int]] = defaultdict(list)  # characters of each, by the prefixes of their ids
        self.num_aborted: Counter[int] = Counter()  # answers to operators, by how many requests they have aborted
        self._crashes = crashes
        self._saw = saw
        self._faults = faults
        self._requests = requests
        self._admissions = admissions
        self._cancelled: list[Response] = []  # by clients, and not over

    def error_logged(self, error: Exception) -> None:
        self._crashes.append(error)

    def connection_displaced(self) -> None:
        self._faults.strike(Harm.DISPLACES)
        self._saw("a connection makes room")

    def bytes_refused(self) -> None:
        self._saw("the buffers are full")

    def claiming(self, count: int) -> None:
        self._admissions.needed = count

    def claim_taken(self) -> None:
        self._admissions.claimants.add(trio.lowlevel.current_task())

    def claim_refused(self) -> None:
        self._requests.num_claims_refused += 1
        self._saw("several slots are refused")

    def aborted_by_id(self, generations: list[Generation], due: int, aborted: int) -> None:
        """Complain unless all that went on are stopped in the same step, and counted."""
        if aborted != due:
            self._complain(f"an operator got {aborted} for {generations}")
        for generation in filter(inside.is_going, generations):
            self._complain(f"an operator has aborted it, and it goes on: {inside.session_of(generation)}")
        self.num_aborted[aborted] += 1
        if aborted:
            self._faults.strike(Harm.OPERATORS)
        self._saw("an operator aborts a request" if aborted else "an operator aborts a request that is over")

    def all_aborted(self, due: int, aborted: int) -> None:
        """Complain unless all that went on are counted."""
        self._faults.strike(Harm.ABORT_ALL)
        self.num_aborted[aborted] += 1
        if aborted != due:
            self._complain(f"abort_all() returned {aborted}, and {due} were going")

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
        self._faults.strike(Harm.DROPS)
        self._saw("a message is dropped")

    def event_put(self, size: int) -> None:
        if size > ROOM:
            self._saw("an outbox is full")

    def delta_put(self, size: int) -> None:
        """Complain if texts for a slow client do not wait for room."""
        if size > ROOM + inside_server.BETWEEN:
            self._complain(f"{size} characters are kept for a slow client")

    def event_queued(self, prefix: str, size: int) -> None:
        self.events[prefix].append(size)

    def check_cancelled(self) -> None:
        """Responses that clients have cancelled do not go on; one on its way in is stopped once it is there."""
        self._cancelled = list(filter(inside_server.is_in_progress, self._cancelled))
        for response in self._cancelled:
            assert not inside_server.goes_on(response), f"{response.id} was cancelled, and goes on"

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))


class ServedEnvironment(PeersEnvironment[Client], PicturesEnvironment):
    """Our server, its clients, and its faults."""

    variants = VARIANTS
    num_variants = len(VARIANTS)

    max_buffered_bytes: ClassVar[int]  # so few that clients are sometimes refused for want of room
    max_buffered_bytes_with_pictures: ClassVar[int]
    serve_config: ClassVar[dict[str, Any]] = {}  # more fields of the server's configuration

    def __init__(self) -> None:
        super().__init__()
        self.simulation.prints_tools = True
        self._closed_by = math.inf  # when the server must be over
        self.watch = ServerWatch(self.loop.crashes, self.coverage.saw, self.faults, self.requests, self.admissions)
        self._taps.enter_context(inside_client.repeatable())
        self._taps.enter_context(inside_server.tapped(self.watch, room=ROOM, at_once=AT_ONCE, kept=KEPT))
        self.server = Server(self.engine, self.make_config())
        self.server_call = Call(Life(self.faults), "server", functools.partial(self.server.run, [self.listener]), ())
        self.loop.start_soon(self.server_call.run, name="server")

    def make_config(self) -> ServeConfig:
        """Return the server's configuration."""
        return ServeConfig(
            max_connections=MAX_CLIENTS,
            max_buffered_bytes=self.max_buffered_bytes,
            tool_call_parser=self.tool_form,
            **self.serve_config,
        )

    @property
    def tool_form(self) -> str:
        """The form of tool calls, which one of the configurations writes without tags."""
        return "json" if self.variant == 1 else "hermes"

    @precondition(lambda self: self.in_use)
    @recorded(way=st.sampled_from(OUTAGES))
    def outage(self, way: str) -> None:
        """Drain or abort the server, abort all requests, or inject a fault into the worker."""
        match way:
            case "abort":
                self._excuse_shutdown()
                self.server.abort()
                self._close_within(ABORT_TIMEOUT)
            case "drain" | "drain soon":
                self._begin_drain(self._drain_server, None if way == "drain" else 0.5)
            case _:
                self._suffer(way)

    def _switch_or_update(self, how: Switch | Literal["update"]) -> None:
        if how != "update":
            self._switch(how)
            return
        self._excuse_sleep()
        self._call("update", functools.partial(self.engine.update_weights, TOY_PATH, mode="keep"), (TransitionFailed,))

    async def _drain_server(self, timeout: float | None) -> bool:
        finished = await self.server.drain(timeout)
        self._close_within(2 * CLOSE_TIMEOUT)
        return finished

    def _close_within(self, seconds: float) -> None:
        """The server closes its connections, and has so long for that."""
        self._closed_by = min(self._closed_by, self.seconds + seconds)

    @property
    def is_closing(self) -> bool:
        """Whether the server closes its connections, the idle ones at once."""
        return math.isfinite(self._closed_by)

    @property
    def is_cutting(self) -> bool:
        """Whether it will cut connections that a worker which hangs keeps busy."""
        return self.is_closing and self.worker is not None and self.worker.health is not Health.WELL

    def _outlast(self) -> None:
        """Wait for the end of everything that outlives its connection."""

    def _all_gone(self) -> None:
        """Check the end of a program, when all clients have gone, and the server still serves."""

    # ---- overrides --------------------------------------------------------------------------------------------------

    def _check_blocked(self) -> None:
        super()._check_blocked()
        claimed = inside.num_claimed(self.engine)
        assert not claimed, f"{claimed} slots are claimed, and nothing will take them"
        is_late = self.seconds >= self._closed_by and not self.server_call.over
        assert not is_late, f"the server is closed, and is not over in time:\n{self.loop.stacks(('server',))}"

    def _make_room(self) -> None:
        inside_server.set_max_buffered_bytes(self.server, self.max_buffered_bytes_with_pictures)

    @property
    def _num_asleep(self) -> int:
        """How many requests wait for a wake."""
        return inside.num_suspended(self.engine) if self.engine.power.asleep else 0

    @property
    def may_connect(self) -> bool:
        """Whether there are no more than one too many; the cheap look comes first, as it is asked before every rule."""
        return len(self.clients) <= MAX_CLIENTS or len(self.present) <= MAX_CLIENTS

    def _check(self) -> None:
        super()._check()
        if not len(inside_payloads.budget(self.engine).line):  # else an event waits for room for its images
            for client in self.clients:
                client.check_at_rest()

    def _let_go(self) -> None:
        for client in self.clients:
            client.close()
        present = [client for client in self.clients if client.peer_state is not PeerState.VANISHED]
        self._run_out(lambda: all(client.stream.closed for client in present), "connections never end")
        self._wake_up()
        self._run_out(lambda: all(client.stream.closed for client in self.clients), "connections never end")
        self._outlast()
        for count, left in inside_server.connection_slots(self.server):
            assert left == count, f"all clients have gone, and {left} of {count} are free"
        kept = inside_server.num_buffered_bytes(self.server)
        assert kept == 0, f"all clients have gone, and {kept} bytes are kept for them"
        keys = len(inside_server.keys_in_use(self.server))
        assert keys == 0, f"all clients have gone, and something is counted for {keys} keys"
        known = len(inside_server.request_ids(self.server))
        assert known == 0, f"all clients have gone, and {known} requests are known by their ids"
        open_sessions = [session for session in inside.sessions(self.engine) if session.end_cause is None]
        assert not open_sessions, f"sessions without a client: {open_sessions}"
        self._all_gone()
        self._begin_drain(self._drain_server, 0.5)
        self._run_out(lambda: self.server_call.over and not self.running_calls, "the server does not end")
