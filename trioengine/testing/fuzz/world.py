"""An engine in a simulated loop, with its workers and callers: runs it to rest and to its end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.observer import Observer
from trioengine.actors.ports import Ports
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError, ModelError, WorkerLost
from trioengine.core.lifecycle import Power
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.callers import Call
from trioengine.testing.fuzz.conversations import MAX_PAYLOADS, PAYLOAD_MEMORY
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.machine import TABLE_STATES, Machine
from trioengine.testing.fuzz.oracles import check_counts, check_decided, check_limits
from trioengine.testing.fuzz.promptness import Bounds, Wait, waits_of
from trioengine.testing.fuzz.request_log import AdmissionLog, RequestLog
from trioengine.testing.fuzz.trace import Trace, is_users
from trioengine.testing.sim_loop import SimLoop
from trioengine.testing.simulated_process import SIGSEGV
from trioengine.testing.simulated_worker import Health, SimulatedWorker
from trioengine.testing.simulation import Simulation
from trioengine.testing.toy_model import TOY_TILE, VOCAB_SIZE
from trioengine.worker.scheduling.sequence import Limits, Windows

CONFIG = EngineConfig(
    model="toy",
    max_num_seqs=2,
    max_num_queued_reqs=0,
    max_sessions=4,
    ping_interval=4.0,
    unresponsive_timeout=6.0,
    step_timeout=15.0,
    worker_shutdown_timeout=14.0,  # half of it is longer than a slow step after the seconds that do no harm
    startup_timeout=15.0,
    restart_delays=(0.0, 1.0),
    max_restarts=50,
    payload_memory=PAYLOAD_MEMORY,
)
LIMITS = Limits(
    vocab_size=VOCAB_SIZE,
    max_model_len=96,
    kv_blocks_total=12,  # no more than one sequence may take: two at a time preempt each other
    block_size=8,
    max_num_seqs=CONFIG.max_num_seqs,
    max_num_batched_tokens=16,
    chunked_prefill_size=8,  # so that every prompt is prefilled in chunks, with decodes in every second step
)
IMAGE_LIMITS = replace(
    LIMITS,
    vocab_size=VOCAB_SIZE + 1,
    tile=TOY_TILE,
    encoder_cache_memory=2 * TOY_TILE.feature_bytes,  # so that pictures are evicted from it
)


class Variant(NamedTuple):
    """Changes of a machine's configuration: of the engine's and of the worker's limits."""

    config: dict[str, Any]
    limits: dict[str, Any]


VARIANTS = (
    Variant({}, {}),
    Variant({"max_num_seqs": 1, "max_sessions": 2, "max_restarts": 1}, {"max_num_batched_tokens": 8, "state_slots": 3}),
    Variant(
        {"max_num_seqs": 4, "max_num_queued_reqs": 3, "num_speculative_tokens": 5},
        {"kv_blocks_total": 24, "block_size": 4, "windows": Windows(size=10, num_blocks=13)},
    ),
)
MORE_VARIANTS = (  # of the machines whose callers use an engine directly
    *VARIANTS,
    Variant(
        {
            "max_num_seqs": 3,
            "max_num_queued_reqs": 1,
            "max_sessions": 6,
            "max_restarts": 2,
            "restart_delays": (0.5, 2.0),
        },
        {
            "kv_blocks_total": 32,
            "block_size": 3,
            "max_num_batched_tokens": 6,
            "chunked_prefill_size": 5,
            "state_slots": 6,
        },
    ),
)
ROUNDS = 400  # of settling between two moments of the clock; more is a livelock


class World(Machine):
    """A machine without rules: runs an engine to rest and to its end, and checks it on the way."""

    reachable = TABLE_STATES
    config = CONFIG
    limits = LIMITS
    variants: tuple[Variant, ...] = ()
    horizon = 60.0  # seconds, past the longest timeout: tasks that wait then, wait forever

    def __init__(self) -> None:
        super().__init__()
        if self.variants:
            self.config = replace(self.config, **self.variants[self.variant].config)
            self.limits = replace(
                self.limits, max_num_seqs=self.config.max_num_seqs, **self.variants[self.variant].limits
            )
        self.loop = SimLoop(is_users)
        self._taps.enter_context(inside.errors_logged("actors", self.loop.crashes.append))
        self.simulation = Simulation(limits=self.limits, thread_threshold=0)
        self.simulation.max_payloads = MAX_PAYLOADS
        self.engine = self.make_engine(self.config, self.simulation.ports)
        self.faults = InjectedFaults(poisoned=self.simulation.poisoned)
        self.engine_call = Call(Life(self.faults), "engine", self.engine.run, (WorkerLost, ModelError))
        self.calls: list[Call] = []
        self.harmed: list[SimulatedWorker] = []  # those that cannot be asked to end well
        self.served: set[SimulatedWorker] = set()  # those that were READY while the engine was open
        self.admissions = AdmissionLog(self.engine, self.loop.crashes)
        self.requests = RequestLog(self.admissions.requests)
        self.engine.observers += [self.coverage, self.admissions, self.requests, _Excuses(self)]
        self.bounds = Bounds()
        self.waited = 0.0  # seconds, since bytes were last moved fairly
        self.loop.start_soon(self.engine_call.run, name="engine")

    def make_engine(self, config: EngineConfig, ports: Ports) -> Engine:
        """Return the engine that the machine drives."""
        return Engine(config, ports=ports)

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        return self.loop.passes

    @property
    def seconds(self) -> float:
        return self.loop.clock.current_time()

    @property
    def checksum(self) -> str:
        return f"{self.loop.steps}:{self.loop.trace:08x}"

    def record(self) -> Trace:
        trace = super().record()
        self.engine.observers.append(trace)
        self.simulation.observers.append(trace)
        trio.lowlevel.add_instrument(trace)
        return trace

    @property
    def worker(self) -> SimulatedWorker | None:
        """The latest incarnation, unless it is over."""
        workers = self.simulation.workers
        return workers[-1] if workers and not workers[-1].reaped else None

    @property
    def running_calls(self) -> list[Call]:
        return [call for call in self.calls if not call.over]

    def _worker(self) -> SimulatedWorker:
        assert self.worker is not None, "the precondition holds"
        return self.worker

    def _call(
        self, name: str, function: Any, allowed: tuple[type[EngineError], ...], timeout: float | None = None
    ) -> None:
        call = Call(Life(self.faults), name, function, allowed, timeout)
        self.calls.append(call)
        self.loop.start_soon(call.run, name=f"{name}-{len(self.calls)}")

    # ---- running it -----------------------------------------------------------------------------------------------

    def act(self, rule: Callable[[], None]) -> None:
        super().act(rule)
        self._try(self._look)
        self._report()
        worker = self.worker
        if worker is not None and inside.has_worker(self.engine) and inside.power(self.engine) is not Power.CLOSED:
            self.served.add(worker)  # one that is READY after the end is killed, as one that still starts

    def _try(self, step: Callable[[], None]) -> None:
        super()._try(functools.partial(self._blame_crashes, step))

    def _blame_crashes(self, step: Callable[[], None]) -> None:
        """Run a step; if it fails, an earlier crash is the reason."""
        try:
            step()
        except Exception:
            self._raise_crash()
            raise

    def _look(self) -> None:
        """Check the invariants that hold after every rule."""
        check_limits(self.engine)
        check_counts(self.engine)

    def _move(self, *, compiles: bool = True) -> bool:
        """Bytes arrive, and the worker does a piece of work; whether there was anything."""
        worker = self.worker
        if worker is None:
            return False
        worker.recover()
        on_their_way = len(worker.to_worker) + len(worker.payloads)
        works = worker.has_work and (compiles or not worker.only_compiles)
        moved = works or len(worker.to_engine) > 0 or (worker.reads and on_their_way > 0)
        worker.deliver()
        worker.receive()
        worker.receive_payloads()
        if compiles or not worker.only_compiles:
            worker.turn()
        return moved

    def _flow(self, rounds: int) -> None:
        for _ in range(rounds):
            self.loop.tick()
            self._move()
        self.loop.tick()

    def _settle(self) -> None:
        if self.worker is None or self.worker.seconds_to_recover <= 0.0:
            self.waited = 0.0
        for _ in range(ROUNDS):
            self.loop.settle()
            self._check_blocked()
            if not self._move():
                return
        raise AssertionError(f"no rest after {ROUNDS} rounds:\n{self.loop.stacks()}")

    def _run_out(
        self, done: Callable[[], bool], complaint: str | Callable[[], str], names: Iterable[str] | None = None
    ) -> None:
        """Settle, and let the clock jump from deadline to deadline, until it is done or the horizon is reached.

        The complaint shows where the tasks with these names wait, in this order, or all tasks.
        """
        self._settle()
        passed = 0.0
        while not done():
            step = self.loop.seconds_to_next_deadline()
            if self.worker is not None and self.worker.seconds_to_recover > 0.0:
                step = min(step, self.worker.seconds_to_recover)
            self._raise_crash()
            if math.isinf(step) or passed >= self.horizon:
                raise self._with_places(complaint if isinstance(complaint, str) else complaint(), names)
            self._check_bounds(step)
            self.loop.clock.jump(max(step, 0.0))
            passed += step
            self._settle()

    def _check_bounds(self, seconds: float) -> None:
        """At rest, and for so many seconds nothing will happen: then nothing takes longer than it may."""
        complaint = self.bounds.too_long(self.seconds, seconds, self._waits())
        if complaint is not None:
            raise self._with_places(complaint)

    def _with_places(self, complaint: str, names: Iterable[str] | None = None) -> AssertionError:
        """The complaint, and where the tasks with these names wait, or all tasks: a summary, and their stacks."""
        places = self.loop.places(names)
        parts = (f"{complaint}:", *([places, ""] if places else []), self.loop.stacks(names))
        return AssertionError("\n".join(parts))

    def _waits(self) -> Iterator[Wait]:
        """Everything that has to be over soon."""
        is_over = self.engine_call.over
        is_closing = self.engine_call.scope.cancel_called or inside.power(self.engine) is Power.CLOSED
        yield from waits_of(self.engine, self.worker, is_closing=is_closing, is_over=is_over)
        for call in self.running_calls:
            if call.name == "drain" and call.timeout is not None:
                yield Wait(call, call.timeout + self.config.worker_shutdown_timeout, "drain() goes on")

    def _raise_crash(self) -> None:
        """Raise the first complaint of a task, or of the engine's peer."""
        dead = [worker for worker in self.simulation.workers if worker.health is Health.DEAD]
        by_poison = sum(worker.exit_code == -SIGSEGV for worker in dead)
        self.faults.retired = inside.num_retired(self.engine)
        # a request that kills workers counts once, and then each time that it got a token
        counted = sum(num_tokens + 1 for num_tokens in self.simulation.poisoned.values())
        self.faults.deaths = len(dead) - self.faults.retired - max(0, by_poison - counted)
        if self.loop.crashes:
            raise self.loop.crashes[0]
        for worker in self.simulation.workers:
            assert worker.blamed is None, f"the engine broke the protocol: {worker.blamed}"
            assert worker.fatal is None, f"a worker failed: {worker.fatal}"

    def _check_blocked(self) -> None:
        """Check the invariants that hold whenever no task can run; the worker may still have work."""
        check_decided(self.engine)
        for call in self.running_calls:
            if trio.current_time() >= call.deadline:  # nothing keeps it, but a drain for the requests of others
                is_kept = call.name == "drain" and any(
                    inside.phase(session) in inside.STOPPING for session in inside.sessions(self.engine)
                )
                assert is_kept, f"its time is over, and it goes on: {call.name}\n{self.loop.stacks()}"

    def _close(self) -> None:
        for worker in self.simulation.workers:
            statistics = worker.core.statistics()
            for state in ("num_preemptions", "prefix_cache_hits", "accepted_tokens"):
                if getattr(statistics, state):
                    self.coverage.saw(state.replace("_", " "))
        self.loop.close()
        self._raise_crash()

    def _excuse_shutdown(self) -> None:
        self.faults.begin(Harm.CLOSING)
        self.faults.begin(Harm.SHUTDOWN)

    def _harm(self) -> None:
        self.faults.begin(Harm.WORKERS)
        if self.worker is not None:
            self.harmed.append(self.worker)


class _Excuses(Observer):
    """Notes which ends of workers and of the engine follow from the faults that a program has injected."""

    def __init__(self, world: World) -> None:
        self._world = world

    def worker_retired(self) -> None:
        """A worker that takes too long to exit is killed, as if it had been harmed."""
        if self._world.worker is not None:
            self._world.harmed.append(self._world.worker)

    def engine_failed(self, error: Exception) -> None:
        """Without a worker the engine ends, which aborts the requests in flight."""
        if self._world.faults.lasts(Harm.WORKERS):
            self._world._excuse_shutdown()
