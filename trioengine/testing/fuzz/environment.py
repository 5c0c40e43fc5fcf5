"""Rules of the environment: time, bytes, payloads, the worker's steps and faults, and the end."""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

import trio
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.core.connection import Connection
from trioengine.core.errors import TransitionFailed
from trioengine.core.messages import Fatal, FatalCode
from trioengine.core.types import Cause
from trioengine.testing.fuzz import inside, inside_payloads
from trioengine.testing.fuzz.faults import Harm
from trioengine.testing.fuzz.leftovers import check_empty, check_tasks
from trioengine.testing.fuzz.oracles import (
    all_going,
    check_books,
    check_call,
    check_line,
    check_shutdown,
    check_stopped,
)
from trioengine.testing.fuzz.payload_watch import ImageStates, PayloadWatch
from trioengine.testing.fuzz.program import JUMPS, recorded
from trioengine.testing.fuzz.world import IMAGE_LIMITS, World
from trioengine.testing.simulated_process import SIGSEGV
from trioengine.testing.simulated_worker import Health
from trioengine.testing.simulation import SealFailure

SOON = (0.5, 0.0)  # timeouts of a drain
UNHARMFUL = 1.5  # seconds that no worker is killed for
SLOW = 5.0  # seconds of a slow step, which harms no request: longer than between two PINGs, shorter than the timeouts
WORKER_OUTAGES = ("hang", "stall", "slow step", "garbage", "nonsense", "close pipe", "fatal")
HARMLESS = ("slow step",)  # of these
ATTEMPTS = 6  # to wake in the end: a worker may be lost on the way
Switch: TypeAlias = Literal["keep", "wake", "abort", "wait", "weights"]
ORDERS = math.factorial(7)  # of the tasks in a `tick`
SEEDS = 1 << 10  # of random orders
STARTS = ("starts fail", "start stalls")
OUTAGES = ("abort all", "abort in flight", *WORKER_OUTAGES, *STARTS, "drain soon", "close", "cancel", "drain", "cancel")


class Environment(World):
    """An engine and the rules of its environment. Subclasses use it, and override `in_use`, `_check…` and `_let_go`."""

    def __init__(self) -> None:
        super().__init__()
        self._killed: list[Connection] = []  # to workers, whose last bytes may have arrived

    # ---- for who uses the engine ----------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether there are callers that an outage can disturb."""
        return bool(self.calls)

    @property
    def is_well(self) -> bool:
        """Whether the worker is healthy and reads its input, so that every request is done at rest."""
        worker = self.worker
        is_well = worker is not None and worker.health is Health.WELL and not worker.payloads.is_broken
        return is_well and inside.has_worker(self.engine)

    def _check(self) -> None:
        """Check the invariants that hold whenever nothing can run."""
        self._raise_crash()
        assert self.faults.closing or not self.engine_call.over, "the engine was not closed, and is over"
        check_books(self.engine)
        for call in self.calls:
            check_call(call, self.faults)
        if self.is_well:
            self._end_faults()

    def _end_faults(self) -> None:
        """Nothing moves, and the worker is well: injected faults have no more effects, but for those that wait."""
        waiting = self.simulation.failing_starts or self.simulation.stalled_starts or self._worker().payloads.fails_next
        poisoned = any(request.id in self.faults.poisoned for _, request in inside.requests(self.engine))
        if not waiting and not poisoned:
            self.faults.end(Harm.WORKERS)
        if self._is_sleep_over:
            self.faults.end(Harm.SLEEP)
            self.faults.end(Harm.SLEEPS_ABORT)
            self.faults.end(Harm.SLEEP_EMPTIES_LINES)

    @property
    def _is_sleep_over(self) -> bool:
        """At rest: whether nothing sleeps, and no call may still put the engine to sleep."""
        return not self.engine.power.asleep and not inside.is_change_pending(self.engine)

    def _let_go(self) -> None:
        """The end: every caller gets its answer, and leaves."""
        self._run_out(lambda: all(call.over for call in self.calls), "callers wait forever")

    # ---- time, bytes, the worker's work ---------------------------------------------------------------------------

    @recorded(passes=st.integers(1, 4), order=st.integers(0, ORDERS - 1))
    def tick(self, passes: int, order: int) -> None:
        """Run scheduler passes, in which the tasks that can run go in this order."""
        self.loop.tick(passes, order)

    @recorded(seed=st.integers(0, SEEDS - 1))
    def reorder(self, seed: int) -> None:
        """From now on, to the end, runnable tasks go in random orders, or in the order of their start if it is 0."""
        self.loop.reorder(seed)

    @recorded(rounds=st.integers(1, 8))
    def flow(self, rounds: int) -> None:
        """A little of everything, fairly."""
        self._flow(rounds)

    @recorded()
    def settle(self) -> None:
        """Until nothing can run, no byte is on its way, and the worker has nothing to do."""
        self._settle()
        self._check()

    @precondition(lambda self: self.worker is not None)
    @recorded(what=st.sampled_from(("receive", "deliver", "turn")), count=st.integers(1, 60))
    def move(self, what: str, count: int) -> None:
        """Bytes arrive at the worker, or at the engine; or the worker handles a message, or steps."""
        worker = self._worker()
        match what:
            case "receive":
                worker.receive(count)
            case "deliver":
                worker.deliver(count)
            case "turn":
                worker.turn()

    @recorded(seconds=st.sampled_from(JUMPS))
    def advance(self, seconds: float) -> None:
        """The clock jumps."""
        self._jump(seconds)

    def _jump(self, seconds: float) -> None:
        self.waited += seconds
        if self.waited > UNHARMFUL:
            self._harm()
        self.loop.clock.jump(seconds)
        self.bounds.interrupt()
        self.loop.tick()

    # ---- faults -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.in_use and self.worker is not None)
    @recorded(last_bytes=st.integers(0, 40))
    def kill_worker(self, last_bytes: int) -> None:
        """Kill the worker: its last bytes still arrive, the rest is cut off."""
        self._kill(last_bytes)

    def _kill(self, last_bytes: int) -> None:
        self._harm()
        worker = self._worker()
        if worker.to_worker:
            self.coverage.saw("a worker dies with bytes on their way to it")
        if (connection := inside.worker_connection(self.engine)) is not None:
            self._killed.append(connection)
        worker.exit(-9)
        worker.deliver(last_bytes)
        worker.end_stream()

    @precondition(lambda self: self.in_use)
    @recorded(way=st.sampled_from(OUTAGES))
    def outage(self, way: str) -> None:
        """Abort all requests, end the engine, or inject a fault into its worker."""
        self._suffer(way)

    def _suffer(self, way: str) -> None:
        worker = self.worker
        if way in WORKER_OUTAGES and way not in HARMLESS:
            self._harm()
        match way:
            case "abort all" | "abort in flight":
                self._abort_all(keep_waiting=way == "abort in flight")
            case "starts fail":
                self.faults.begin(Harm.WORKERS)
                self.simulation.failing_starts = 2
            case "start stalls":
                self.faults.begin(Harm.WORKERS)
                self.simulation.stalled_starts = 1
            case "drain":
                self._begin_drain(self._drain, None)
            case "drain soon":
                self._begin_drain(self._drain, SOON[len(self.calls) % len(SOON)])
            case "close":
                self._excuse_shutdown()
                self.engine.close()
            case "cancel":
                self._excuse_shutdown()
                self.engine_call.scope.cancel()
            case "hang" if worker is not None:
                worker.hang()
            case "stall" if worker is not None:
                worker.stall()
            case "slow step" if worker is not None:
                worker.stall(SLOW)
            case "close pipe" if worker is not None:
                worker.close_pipe()
            case "fatal" if worker is not None:
                code = FatalCode.INTERNAL if inside.has_worker(self.engine) else FatalCode.MODEL
                worker.give_up(Fatal(code, "on request", ""))
            case "garbage" if worker is not None:
                worker.say(b"\xff" * 8)
            case "nonsense" if worker is not None:  # a frame, and no message
                worker.say(bytes.fromhex("0300000081a16101"))

    def _abort_all(self, *, keep_waiting: bool) -> None:
        self.faults.strike(Harm.ABORT_ALL)
        in_flight = {inside.request_of(session) for session in inside.sessions(self.engine)}
        going = all_going(self.engine, with_waiting=not keep_waiting)
        self.requests.fix_cause(going, Cause.ABORT_ALL)
        ended = self.engine.abort_all(keep_waiting=keep_waiting)
        assert ended == len(going), f"abort_all() returned {ended}, and {len(going)} were going"
        check_stopped(self.engine, in_flight)
        if not keep_waiting:
            check_line(self.engine)

    # ---- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._raise_crash()
        self._let_go()
        self._check()
        self._check_left()
        self._excuse_shutdown()
        self.engine.close()
        self._run_out(lambda: self.engine_call.over, "the engine does not end")
        self._raise_crash()
        taken = inside.num_sessions(self.engine)
        assert taken == len(inside.sessions(self.engine)) == 0, f"{taken} session slots are not free"
        self.requests.check(self.engine)
        assert self.loop.idle, f"tasks are left:\n{self.loop.stacks()}"
        check_empty(self.engine, None)
        for worker in self.simulation.workers:
            assert worker.reaped, f"worker {worker.pid} was not reaped"
        for worker in self.simulation.workers:
            if worker in self.served and worker not in self.harmed and worker.exit_code != -SIGSEGV:
                check_shutdown(worker)

    def _check_left(self) -> None:
        """All callers have gone: the engine, and a worker that is well, hold nothing of them."""
        if self.is_well and self.engine_call.task is not None:
            check_empty(self.engine, self._worker())
            check_tasks(self.engine_call.task)

    def _close(self) -> None:
        super()._close()
        for connection in self._killed:
            if connection.has_partial_frame:
                self.coverage.saw("a worker's last frame is torn")

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _switch(self, how: Switch) -> None:
        """Put the engine to sleep in this mode, or wake it, or its weights alone."""
        self._excuse_sleep()
        match how:
            case "wake" | "weights":
                call = functools.partial(self.engine.wake, None if how == "wake" else how)
            case mode:
                call = functools.partial(self.engine.sleep, mode=mode)
        self._call("switch", call, (TransitionFailed,))

    def _excuse_sleep(self) -> None:
        """Requests may be suspended, and a drain aborts these."""
        self.faults.begin(Harm.SLEEP)
        if self.faults.closing:
            self.faults.begin(Harm.SHUTDOWN)

    def _wake_up(self) -> None:
        """Wake the engine: asleep it sends nothing, so that it cannot detect a client that has vanished."""
        for _ in range(ATTEMPTS):
            self._run_out(lambda: not inside.is_change_pending(self.engine), "a sleep is never done")
            if not self.engine.power.asleep or self.faults.closing:
                return
            self._call("wake", self.engine.wake, (TransitionFailed,))
            self._run_out(lambda: self.calls[-1].over, "a wake is never done")

    def _begin_drain(self, drain: Callable[[float | None], Awaitable[Any]], timeout: float | None) -> None:
        self.faults.begin(Harm.CLOSING)
        if timeout is not None or self.faults.lasts(Harm.SLEEP):
            self._excuse_shutdown()
        self._call("drain", functools.partial(self._judged, drain, timeout), (), timeout)

    async def _judged(self, drain: Callable[[float | None], Awaitable[Any]], timeout: float | None) -> None:
        """Check the result of a drain: True only if nothing was aborted, False only if something was or it was late."""
        began, before = trio.current_time(), self.requests.num_shut_down
        if await drain(timeout):
            aborted = self.requests.num_shut_down - before
            assert not aborted, f"drain() is True, and {aborted} requests were aborted"
        else:
            is_late = timeout is not None and trio.current_time() >= began + timeout
            assert is_late or self.requests.num_shut_down, "drain() is False, and nothing was aborted"

    async def _drain(self, timeout: float | None) -> bool:
        finished = await self.engine.drain(timeout)
        if finished:
            assert not inside.num_in_flight(self.engine), "drain() is True, and requests are in flight"
        else:
            check_stopped(self.engine, {inside.request_of(session) for session in inside.sessions(self.engine)})
        return finished


class PicturesEnvironment(Environment):
    """Payloads are counted after every rule. Who uses the engine has the rules that send pictures."""

    limits = IMAGE_LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.payloads = PayloadWatch(self.engine, self.simulation, self.loop.crashes, self.coverage.saw)
        self._taps.enter_context(inside_payloads.tapped(self.payloads))
        images = ImageStates(self.coverage.saw)
        self.simulation.observers.append(images)
        self.engine.observers.append(images)
        self.faults.dropped = self.payloads.dropped
        self.shows = True

    # ---- rules ----------------------------------------------------------------------------------------------------

    @recorded(initialize, shows=st.booleans())
    def choose(self, shows: bool) -> None:
        """Half of the programs have no pictures, so that the other rules run as often as before."""
        self.shows = shows
        if shows:
            self._make_room()

    def _make_room(self) -> None:
        """Raise bounds that pictures would exceed, other than the payload budget."""

    @precondition(lambda self: self.worker is not None and self.worker.has_images)
    @recorded(what=st.sampled_from(("receive", "decode", "begin")))
    def move_payload(self, what: str) -> None:
        """One payload arrives at the worker; or one image is decoded, beside a step, or its decoding begins."""
        worker = self._worker()
        if what == "receive" or not worker.decoder:
            worker.receive_payloads(1)
        elif what == "begin":
            worker.begin_decoding()
        else:
            worker.decode()

    @precondition(lambda self: self.shows and self.in_use and self.worker is not None)
    @recorded()
    def break_payloads(self) -> None:
        """The payload socket breaks. The worker notices that as far as something was on its way."""
        self._harm()
        worker = self._worker()
        is_used = len(worker.payloads) > 0
        worker.break_payloads()
        if is_used and worker.reads:
            worker.give_up(Fatal(FatalCode.INTERNAL, "the payload socket broke", ""))

    @precondition(lambda self: self.shows and self.in_use)
    @recorded(what=st.sampled_from(("create", "write", "send")))
    def fail_system(self, what: str) -> None:
        """The next memfd cannot be made, or not be written; or the next descriptor cannot be sent."""
        if what != "send":
            self.simulation.failing_seals = [SealFailure[what.upper()]]
        elif self.worker is not None:
            self._harm()
            self.worker.fail_send()

    # ---- checks ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        super()._look()
        self.payloads.check()

    def _check_blocked(self) -> None:
        super()._check_blocked()
        self.payloads.check_blocked()

    def _check(self) -> None:
        self.payloads.check()
        super()._check()
        if self.is_well:
            self.payloads.check_at_rest()

    def _finish(self) -> None:
        super()._finish()
        self.payloads.check()
        self.payloads.check_at_the_end()
