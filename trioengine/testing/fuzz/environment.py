"""What surrounds an engine: time, bytes on their way, a worker that steps, goes wrong or dies, and the end.

The machines that use the engine, each in its way, are built on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import trio
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.actors.engine import Engine
from trioengine.actors.waiting_line import WaitingLine
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError, ModelError, WorkerLost
from trioengine.core.lifecycle import Cause, Phase, Power
from trioengine.core.messages import Fatal, FatalCode
from trioengine.testing.fuzz.callers import Call
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.oracles import (
    Troubles,
    check_books,
    check_decided,
    check_farewell,
    check_limits,
    check_stopped,
)
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.watching import in_order
from trioengine.testing.mutants.mutant import replaced
from trioengine.testing.sim_loop import SimLoop
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.testing.simulation import Simulation
from trioengine.testing.toy_model import VOCAB_SIZE
from trioengine.worker.scheduling.limits import Limits

CONFIG = EngineConfig(
    model="toy",
    max_num_seqs=2,
    max_num_queued_reqs=0,
    max_sessions=4,
    ping_interval=4.0,
    unresponsive_timeout=6.0,
    step_timeout=15.0,
    startup_timeout=15.0,
    restart_delays=(0.0, 1.0),
    max_restarts=50,
)
LIMITS = Limits(
    vocab_size=VOCAB_SIZE,
    max_model_len=96,
    kv_blocks_total=12,  # no more than one sequence may take: two at a time preempt each other
    block_size=8,
    max_num_seqs=CONFIG.max_num_seqs,
    max_num_batched_tokens=8,  # so that every prompt is prefilled in chunks
)
UNHARMFUL = 1.5  # seconds that no worker is killed for
ROUNDS = 400  # of settling between two moments of the clock; more is a livelock
SLOW = 3.0  # seconds of a slow step; the timeouts are longer
WORKER_OUTAGES = ("hang", "stall", "slow step", "garbage", "nonsense", "close pipe", "fatal")
STARTS = ("starts fail", "start stalls")
OUTAGES = ("abort all", *WORKER_OUTAGES, *STARTS, "drain soon", "close", "cancel", "drain", "cancel")


class Environment(Machine):
    """An engine, and the rules that are nobody's will. Who uses it overrides `in_use`, `_check…` and `_let_go`."""

    horizon = 60.0  # seconds, past the longest timeout: what waits then, waits for ever

    def __init__(self) -> None:
        super().__init__()
        self.loop = SimLoop()
        self.simulation = Simulation(limits=LIMITS, thread_threshold=0)
        self.engine = Engine(CONFIG, ports=self.simulation.ports)
        self.engine_call = Call("engine", self.engine.run, (WorkerLost, ModelError))
        self.calls: list[Call] = []
        self.troubles = Troubles()
        self.harmed: list[SimulatedWorker] = []  # those that cannot be asked to end well
        self.served: set[SimulatedWorker] = set()  # those that were READY while the engine was open
        self._watching = ExitStack()
        self._watch(WaitingLine, "wait", in_order(self.loop.crashes))
        self.waited = 0.0  # seconds, since bytes were last moved fairly
        self.loop.start_soon(self.engine_call.run, name="engine")

    # ---- for who uses the engine ----------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether anybody has asked for anything, so that an outage disturbs something."""
        return bool(self.calls)

    def _check(self) -> None:
        """What must hold whenever nothing can run."""
        self._raise_crash()
        if self.engine_call.over and not self.troubles.closing:
            assert self.engine_call.error is not None and self.troubles.workers, "nobody closed the engine"
            self._excuse_shutdown()
        check_books(self.engine)

    def _check_blocked(self) -> None:
        """What must hold whenever no task can run, whatever the worker still has to do."""
        check_decided(self.engine)
        for call in self.running_calls:
            if trio.current_time() >= call.deadline:  # its request is on the worker, or nothing keeps it
                phases = {session.phase for session in self.engine._sessions}
                assert phases & {Phase.STOPPING, Phase.ENDING}, f"its time is over, and it goes on: {call.name}"

    def _let_go(self) -> None:
        """The end: everybody gets what they wait for, and leaves."""
        self._run_out(lambda: all(call.over for call in self.calls), "callers wait for ever")

    # ---- time, bytes, the worker's work ---------------------------------------------------------------------------

    @recorded(passes=st.integers(1, 4), order=st.integers(0, 80))
    def tick(self, passes: int, order: int) -> None:
        """Scheduler passes; `order` says in base 3 who goes first in each."""
        self.loop.tick((order // 3**index) % 3 for index in range(passes))

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

    @recorded(seconds=st.sampled_from((0.2, 1.0, 0.6, 11.0)))
    def advance(self, seconds: float) -> None:
        """The clock jumps."""
        self.waited += seconds
        if self.waited > UNHARMFUL:
            self._harm()
        self.loop.clock.jump(seconds)
        self.loop.tick()

    # ---- what happens to all of them ------------------------------------------------------------------------------

    @precondition(lambda self: self.in_use and self.worker is not None)
    @recorded(last_bytes=st.integers(0, 40))
    def kill_worker(self, last_bytes: int) -> None:
        """Its last bytes still arrive; what is behind them is torn off."""
        self._harm()
        worker = self._worker()
        if worker.to_worker:
            self.rare.saw("a worker dies with bytes on their way to it")
        if len(worker.to_engine) > last_bytes:
            self.rare.saw("a worker's last frame is torn")
        worker.exit(-9)
        worker.deliver(last_bytes)
        worker.end_stream()

    @precondition(lambda self: self.in_use)
    @recorded(way=st.sampled_from(OUTAGES))
    def outage(self, way: str) -> None:
        """The engine is told to stop everything, or its worker goes wrong."""
        self._suffer(way)

    def _suffer(self, way: str) -> None:
        worker = self.worker
        if way in WORKER_OUTAGES:
            self._harm()
        match way:
            case "abort all":
                self.troubles.causes.add(Cause.ABORT_ALL)
                in_flight = {session.generation for session in self.engine._sessions if session.generation is not None}
                self.engine.abort_all()
                check_stopped(self.engine, in_flight)
            case "starts fail":
                self.troubles.workers = True
                self.simulation.failing_starts = 2
            case "start stalls":
                self.troubles.workers = True
                self.simulation.stalled_starts = 1
            case "drain" | "drain soon":
                self._begin_drain(self._drain, None if way == "drain" else 0.5)
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
                code = FatalCode.MODEL if self.engine.gate.link is None else FatalCode.INTERNAL
                worker.give_up(Fatal(code, "told to", ""))
            case "garbage" if worker is not None:
                worker.say(b"\xff" * 8)
            case "nonsense" if worker is not None:  # a frame, and no message
                worker.say(bytes.fromhex("0300000081a16101"))

    # ---- the end --------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        for worker in self.simulation.workers:
            statistics = worker.step_loop.statistics()
            for state in ("num_preemptions", "prefix_cache_hits"):
                if getattr(statistics, state):
                    self.rare.saw(state.replace("_", " "))
        try:
            self.loop.close()
        finally:
            self._watching.close()
        self._raise_crash()

    def _finish(self) -> None:
        self._raise_crash()
        self._let_go()
        self._check()
        self._excuse_shutdown()
        self.engine.close()
        self._run_out(lambda: self.engine_call.over, "the engine does not end")
        self._raise_crash()
        ledger = self.engine.gate.ledger
        assert ledger.sessions == len(self.engine._sessions) == 0, f"{ledger.sessions} session slots are not free"
        assert self.loop.idle, f"tasks are left:\n{self.loop.stacks()}"
        for worker in self.simulation.workers:
            assert worker.reaped, f"worker {worker.pid} was not reaped"
        for worker in self.simulation.workers:
            if worker in self.served and worker not in self.harmed:
                check_farewell(worker)

    # ---- helpers --------------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        return self.loop.passes

    @property
    def checksum(self) -> str:
        return f"{self.loop.steps}:{self.loop.trace:08x}"

    @property
    def worker(self) -> SimulatedWorker | None:
        """The latest incarnation, unless it is over."""
        workers = self.simulation.workers
        return workers[-1] if workers and not workers[-1].reaped else None

    @property
    def running_calls(self) -> list[Call]:
        return [call for call in self.calls if not call.over]

    def _worker(self) -> SimulatedWorker:
        assert self.worker is not None, "a precondition says so"
        return self.worker

    def _call(
        self, name: str, function: Any, allowed: tuple[type[EngineError], ...], timeout: float | None = None
    ) -> None:
        call = Call(name, function, allowed, timeout)
        self.calls.append(call)
        self.loop.start_soon(call.run, name=f"{name}-{len(self.calls)}")

    def _begin_drain(self, drain: Callable[[float | None], Awaitable[Any]], timeout: float | None) -> None:
        self.troubles.closing = True
        if timeout is not None:
            self.troubles.causes.add(Cause.SHUTDOWN)
        self._call("drain", functools.partial(drain, timeout), (), timeout)

    async def _drain(self, timeout: float | None) -> None:
        if await self.engine.drain(timeout):
            assert not self.engine.gate.ledger.in_flight, "it said that it was drained"
        else:
            assert timeout is not None, "without a timeout all of it is waited for"
            check_stopped(self.engine, {session.generation for session in self.engine._sessions} - {None})

    def _watch(self, owner: Any, name: str, mutate: Callable[[Any], Any]) -> None:
        self._watching.enter_context(replaced(owner, name, mutate)())

    def _excuse_shutdown(self) -> None:
        self.troubles.closing = True
        self.troubles.causes.add(Cause.SHUTDOWN)

    def _harm(self) -> None:
        self.troubles.workers = True
        if self.worker is not None:
            self.harmed.append(self.worker)

    def act(self, rule: Callable[[], None]) -> None:
        super().act(rule)
        self._try(functools.partial(check_limits, self.engine))
        self._report()
        gate, worker = self.engine.gate, self.worker
        if gate.link is not None and gate.power is not Power.CLOSED and worker is not None:
            self.served.add(worker)  # one that is READY after the end is killed, as one that still starts

    def _move(self) -> bool:
        """Bytes arrive, and the worker does a piece of work; whether there was anything."""
        worker = self.worker
        if worker is None:
            return False
        worker.recover()
        moved = worker.has_work or len(worker.to_engine) > 0 or (worker.reads and len(worker.to_worker) > 0)
        worker.deliver()
        worker.receive()
        worker.turn()
        return moved

    def _flow(self, rounds: int) -> None:
        for _ in range(rounds):
            self.loop.tick()
            self._move()
        self.loop.tick()

    def _settle(self) -> None:
        self.waited = 0.0
        for _ in range(ROUNDS):
            ran = self.loop.settle() > 0
            self._check_blocked()
            if not self._move() and not ran:
                return
        raise AssertionError(f"no rest after {ROUNDS} rounds:\n{self.loop.stacks()}")

    def _run_out(self, done: Callable[[], bool], complaint: str) -> None:
        """Settle, and let the clock jump from deadline to deadline, until it is done or the horizon is reached."""
        self._settle()
        passed = 0.0
        while not done():
            step = self.loop.seconds_to_next_deadline()
            self._raise_crash()
            assert math.isfinite(step) and passed < self.horizon, f"{complaint}:\n{self.loop.stacks()}"
            self.loop.clock.jump(max(step, 0.0))
            passed += step
            self._settle()

    def _raise_crash(self) -> None:
        """What a task, or the engine's peer, complained of."""
        if self.loop.crashes:
            raise self.loop.crashes[0]
        for worker in self.simulation.workers:
            assert worker.blamed is None, f"the engine broke the protocol: {worker.blamed}"
            assert worker.fatal is None, f"a worker failed: {worker.fatal}"
