"""The engine under hypothesis: programs that use it, bytes that move, a worker that steps or dies, a clock."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition

from trioengine.actors.engine import Engine
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineClosed, EngineError, EngineOverloaded, InvariantError, WorkerLost
from trioengine.core.lifecycle import Power
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.fuzz.callers import Call, Holder, Reader, Style
from trioengine.testing.fuzz.oracles import check_books, check_farewell, check_holder, check_reader, check_worker
from trioengine.testing.fuzz.program import Program, recorded
from trioengine.testing.fuzz.rare import Rare
from trioengine.testing.sim_loop import Livelock, SimLoop
from trioengine.testing.simulated_worker import Health, SimulatedWorker
from trioengine.testing.simulation import Simulation
from trioengine.testing.toy_model import VOCAB_SIZE
from trioengine.worker.scheduling.limits import Limits

T = TypeVar("T")
Task = TypeVar("Task", Holder, Reader)

CONFIG = EngineConfig(
    model="toy",
    max_num_seqs=2,
    max_num_queued_reqs=0,
    max_sessions=4,
    ping_interval=4.0,
    unresponsive_timeout=6.0,
    step_timeout=15.0,
    restart_delays=(0.0, 1.0),
    max_restarts=50,
)
LIMITS = Limits(
    vocab_size=VOCAB_SIZE,
    max_model_len=96,
    kv_blocks_total=16,
    block_size=8,
    max_num_seqs=CONFIG.max_num_seqs,
    max_num_batched_tokens=8,  # so that every prompt is prefilled in chunks
)
AUDIT_TIMEOUT = 10.0
UNHARMFUL = 1.5  # seconds that no worker is killed for
HORIZON = 60.0  # seconds, past the longest timeout: what waits then, waits for ever
ROUNDS = 400  # of settling between two moments of the clock; more is a livelock

PROMPTS = ("a", "be", "<|im_end|>")
WHICH = st.integers(0, 3)
WORKER_OUTAGES = ("hang", "stall", "garbage", "nonsense", "close pipe")
OUTAGES = ("abort all", *WORKER_OUTAGES, "starts fail", "abort all", "drain soon", "close", "cancel", "drain", "cancel")


class EngineMachine(RuleBasedStateMachine):
    """Rules are what the outside world can do; the arguments choose among what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.program = Program(type(self).__name__)
        self.rare = Rare()
        self.rare.begin()
        self.loop = SimLoop()
        self.simulation = Simulation(limits=LIMITS, thread_threshold=0)
        self.engine = Engine(CONFIG, ports=self.simulation.ports)
        self.engine_call = Call("engine", self.engine.run, (WorkerLost,))
        self.holders: list[Holder] = []
        self.readers: list[Reader] = []
        self.calls: list[Call] = []
        self.harmed: list[SimulatedWorker | None] = []  # those that cannot be asked to end well
        self.waited = 0.0  # seconds, since bytes were last moved fairly
        self.parting: list[SimulatedWorker] = []  # the one that was READY when the engine was first told to end
        self.loop.start_soon(self.engine_call.run, name="engine")

    @recorded(
        initialize,
        ready=st.sampled_from((True, True, True, False)),
        sessions=st.integers(0, 2),
        turns=st.integers(0, 1),
        thread_passes=st.integers(1, 4),
    )
    def begin(self, ready: bool, sessions: int, turns: int, thread_passes: int) -> None:
        """Mostly from an engine that is ready, with sessions that the worker may know already."""
        self.simulation.thread_passes = thread_passes
        if ready:
            self._settle()
        for _ in range(sessions):
            self._open(wait=True)
        if ready:
            self.loop.settle()
        for session in range(sessions if ready else 0):
            for _ in range(turns):
                self._read(session, Style.ALL, SamplingParams(max_tokens=1))
                self._settle()

    # ---- time, bytes, the worker's work ---------------------------------------------------------------------------

    @recorded(passes=st.integers(1, 4), order=st.integers(0, 80))
    def tick(self, passes: int, order: int) -> None:
        """Scheduler passes; `order` says in base 3 who goes first in each."""
        self.loop.tick((order // 3**index) % 3 for index in range(passes))

    @recorded(rounds=st.integers(1, 8))
    def flow(self, rounds: int) -> None:
        """A little of everything, fairly."""
        for _ in range(rounds):
            self.loop.tick()
            self._move()
        self.loop.tick()

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
            self.harmed.append(self.worker)
        self.loop.clock.jump(seconds)
        self.loop.tick()

    # ---- programs that use the engine -----------------------------------------------------------------------------

    @recorded(wait=st.booleans())
    def open(self, wait: bool) -> None:
        self._open(wait)

    @precondition(lambda self: self.open_holders)
    @recorded(which=WHICH, max_tokens=st.sampled_from((1, 2, 5, 40)))
    def ask(self, which: int, max_tokens: int) -> None:
        self._read(which, Style.ALL, SamplingParams(max_tokens=max_tokens))

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(PROMPTS),
        stop=st.sampled_from(("", "e", "a b")),
        style=st.sampled_from([style.value for style in Style]),
        keep_partial=st.booleans(),
        timeout=st.sampled_from((None, 0.5, 8.0)),
        wait=st.booleans(),
    )
    def ask_so(
        self, which: int, prompt: str, stop: str, style: str, keep_partial: bool, timeout: float | None, wait: bool
    ) -> None:
        params = SamplingParams(max_tokens=20, stop=(stop,) if stop else ())
        self._read(which, Style(style), params, prompt=prompt, keep_partial=keep_partial, timeout=timeout, wait=wait)

    @recorded(what=st.sampled_from(("ask", "audit", "cancel")), wait=st.booleans(), which=WHICH)
    def call(self, what: str, wait: bool, which: int) -> None:
        """`engine.generate` with a session of its own, `engine.check_invariants`; or one of these is cancelled."""
        refusals = (EngineOverloaded, EngineClosed, WorkerLost)
        if what == "ask":
            params, timeout = SamplingParams(max_tokens=3), (None, None, 0.5, 8.0)[which]
            self._call("ask", lambda: self.engine.generate("hi", params, wait=wait, timeout=timeout), refusals)
        elif what == "audit":
            self._call("audit", self._audit, refusals)
        elif self.running_calls:
            _pick(self.running_calls, which).scope.cancel()

    async def _audit(self) -> None:
        try:
            await self.engine.check_invariants(timeout=AUDIT_TIMEOUT)
        except InvariantError as exc:
            if "did not answer" not in str(exc):  # that alone is no finding: its bytes may not move in time
                raise

    @precondition(lambda self: self.readers)
    @recorded(which=WHICH, what=st.sampled_from(("abort", "cancel", "go on", "abort by id", "fail")))
    def stop_reading(self, which: int, what: str) -> None:
        """Also of a request that is over; the latest is the first to be chosen."""
        reader = _pick(_latest_first(self.readers), which)
        self._note_moment(reader, what)
        if what == "cancel":
            reader.scope.cancel()
        elif what == "go on":
            reader.go_on.set()
        elif reader.generation is not None and reader.entered:
            if what == "abort":
                reader.generation.abort()
            elif what == "abort by id":
                self.engine.abort(reader.generation.request_id)
            elif self.worker is not None:  # the worker cannot sample for it: it fails alone
                self.worker.runner.fail_requests.add(reader.generation.request_id)

    @precondition(lambda self: self.holders)
    @recorded(which=WHICH, what=st.sampled_from(("leave", "cancel", "end")))
    def leave(self, which: int, what: str) -> None:
        """Also a session that has ended."""
        holder = _pick(_latest_first(self.holders), which)
        match what:
            case "leave":
                holder.leave.set()
            case "cancel":
                holder.scope.cancel()
            case "end" if holder.session is not None:
                holder.session.end()

    # ---- for all of them ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.readers and self.worker is not None)
    @recorded(last_bytes=st.integers(0, 40))
    def kill_worker(self, last_bytes: int) -> None:
        """Its last bytes still arrive; what is behind them is torn off."""
        worker = self._worker()
        self.harmed.append(worker)
        if worker.to_worker:
            self.rare.saw("a worker dies with bytes on their way to it")
        if len(worker.to_engine) > last_bytes:
            self.rare.saw("a worker's last frame is torn")
        worker.exit(-9)
        worker.deliver(last_bytes)
        worker.end_stream()

    @precondition(lambda self: self.readers)
    @recorded(way=st.sampled_from(OUTAGES))
    def outage(self, way: str) -> None:
        """The engine is told to stop everything, or its worker goes wrong."""
        worker = self.worker
        if way in WORKER_OUTAGES:
            self.harmed.append(worker)
        match way:
            case "abort all":
                self.engine.abort_all()
            case "starts fail":
                self.simulation.failing_starts = 2
            case "drain" | "drain soon":
                self._call("drain", lambda: self.engine.drain(None if way == "drain" else 0.5), ())
            case "close":
                self._note_parting()
                self.engine.close()
            case "cancel":
                self._note_parting()
                self.engine_call.scope.cancel()
            case "hang" if worker is not None:
                worker.hang()
            case "stall" if worker is not None:
                worker.stall()
            case "close pipe" if worker is not None:
                worker.close_pipe()
            case "garbage" if worker is not None:
                worker.say(b"\xff" * 8)
            case "nonsense" if worker is not None:  # a frame, and no message
                worker.say(bytes.fromhex("0300000081a16101"))

    # ---- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            self._close()
            self._raise_crash()

    def _close(self) -> None:
        for worker in self.simulation.workers:
            statistics = worker.step_loop.statistics()
            for state in ("num_preemptions", "prefix_cache_hits"):
                if getattr(statistics, state):
                    self.rare.saw(state.replace("_", " "))
        self.rare.end()
        try:
            self.loop.close()
        except Livelock as exc:
            self.loop.crashes.append(exc)

    def _finish(self) -> None:
        self._raise_crash()
        for reader in self.readers:
            reader.go_on.set()
        self._run_out(lambda: all(reader.over for reader in self.readers), "readers wait for ever")
        for holder in self.holders:
            holder.leave.set()
        self._run_out(lambda: not self.running_holders and not self.running_calls, "callers wait for ever")
        self._check()
        self._note_parting()
        self.engine.close()
        self._run_out(lambda: self.engine_call.over, "the engine does not end")
        self._raise_crash()
        assert self.loop.idle, f"tasks are left:\n{self.loop.stacks()}"
        for worker in self.simulation.workers:
            assert worker.reaped, f"worker {worker.pid} was not reaped"
        for worker in self.parting:
            if worker not in self.harmed:
                check_farewell(worker)

    # ---- helpers --------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> SimulatedWorker | None:
        """The latest incarnation, unless it is over."""
        workers = self.simulation.workers
        return workers[-1] if workers and not workers[-1].reaped else None

    @property
    def open_holders(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.is_open]

    @property
    def running_holders(self) -> list[Holder]:
        return [holder for holder in self.holders if not holder.over]

    @property
    def running_calls(self) -> list[Call]:
        return [call for call in self.calls if not call.over]

    @property
    def running_readers(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.over]

    def _read(
        self,
        which: int,
        style: Style,
        params: SamplingParams,
        *,
        prompt: str = "a",
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool = True,
    ) -> None:
        holder = _pick(sorted(self.open_holders, key=_is_busy), which)
        reader = Reader(holder, prompt, params, style, keep_partial, timeout, wait)
        holder.readers.append(reader)
        self.readers.append(reader)
        self.loop.start_soon(reader.run, name=f"reader-{len(self.readers)}")

    def _open(self, wait: bool) -> None:
        holder = Holder(self.engine, wait)
        self.holders.append(holder)
        self.loop.start_soon(holder.run, name=f"holder-{len(self.holders)}")

    def _call(self, name: str, function: Any, allowed: tuple[type[EngineError], ...]) -> None:
        call = Call(name, function, allowed)
        self.calls.append(call)
        self.loop.start_soon(call.run, name=f"{name}-{len(self.calls)}")

    def _note_parting(self) -> None:
        if not self.engine_call.scope.cancel_called and self.engine.gate.link is not None and not self.parting:
            self.parting = [self._worker()]

    def _note_moment(self, reader: Reader, what: str) -> None:
        session, generation, worker = reader.holder.session, reader.generation, self.worker
        if generation is None or session is None or reader.over:
            return
        if not reader.entered:
            self.rare.saw(f"{what} on the way in")
        elif session.attached and worker is not None and session.id not in worker.step_loop.sessions:
            self.rare.saw(f"{what} before the worker has seen ADD_SESSION")
        elif generation.outcome is not None:
            self.rare.saw(f"{what} after the outcome, before it is read")

    def _worker(self) -> SimulatedWorker:
        assert self.worker is not None, "a precondition says so"
        return self.worker

    def _move(self) -> bool:
        """Bytes arrive, and the worker does a piece of work; whether there was anything."""
        worker = self.worker
        if worker is None:
            return False
        moved = worker.has_work or len(worker.to_engine) > 0 or (worker.reads and len(worker.to_worker) > 0)
        worker.deliver()
        worker.receive()
        worker.turn()
        return moved

    def _settle(self) -> None:
        self.waited = 0.0
        for _ in range(ROUNDS):
            ran = self.loop.settle() > 0
            if not self._move() and not ran:
                return
        raise AssertionError(f"no rest after {ROUNDS} rounds:\n{self.loop.stacks()}")

    def _run_out(self, done: Any, complaint: str) -> None:
        """Settle, and let the clock jump from deadline to deadline, until it is done or the horizon is reached."""
        self._settle()
        passed = 0.0
        while not done():
            step = self.loop.seconds_to_next_deadline()
            self._raise_crash()
            assert math.isfinite(step) and passed < HORIZON, f"{complaint}:\n{self.loop.stacks()}"
            self.loop.clock.jump(max(step, 0.0))
            passed += step
            self._settle()

    def _check(self) -> None:
        """What must hold whenever nothing can run."""
        self._raise_crash()
        check_books(self.engine, self.holders, self.readers)
        for reader in self.readers:
            if reader.over and not reader.checked:
                check_reader(reader, LIMITS.max_model_len)
                reader.checked = True
        for holder in self.holders:
            check_holder(holder)
        worker = self.worker
        if worker is not None and worker.health is Health.WELL and self.engine.gate.power is Power.AWAKE:
            check_worker(self.engine, worker, self.holders)

    def _raise_crash(self) -> None:
        """One exception, from one place, whatever crashed: so that shrinking compares like with like."""
        if self.loop.crashes:
            raise self.loop.crashes[0]
        for worker in self.simulation.workers:
            assert worker.blamed is None, f"the engine broke the protocol: {worker.blamed}"


def _is_busy(holder: Holder) -> bool:
    return any(not reader.over for reader in holder.readers)


def _latest_first(tasks: list[Task]) -> list[Task]:
    """Those that are over come last."""
    return [task for task in tasks[::-1] if not task.over] + [task for task in tasks[::-1] if task.over]


def _pick(candidates: list[T], which: int) -> T:
    return candidates[which % len(candidates)]
