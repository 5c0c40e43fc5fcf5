"""An engine under hypothesis that sleeps, wakes and updates weights; requests outlive its workers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import trio
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.actors.observer import Observer, Slot
from trioengine.core.errors import EngineAsleep, EngineOverloaded, RequestRejected, TransitionFailed
from trioengine.core.lifecycle import Phase, Power, PowerStage
from trioengine.core.power import TagName
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.callers import Call, Style
from trioengine.testing.fuzz.calls_machine import WHICH
from trioengine.testing.fuzz.changes import UNFIT, Change, Changes
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.faults import Harm, Life
from trioengine.testing.fuzz.grammars import GOOD, GRAMMARS
from trioengine.testing.fuzz.misuse import CALLS, check_refused_call
from trioengine.testing.fuzz.oracles import check_line
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.promptness import Wait
from trioengine.testing.fuzz.sessions_machine import ADAPTERS
from trioengine.testing.fuzz.state_readers import StateLog, StateReader
from trioengine.testing.fuzz.tools_machine import CALLING, LONGEST, PLACES, moment_of
from trioengine.testing.fuzz.world import CONFIG
from trioengine.testing.simulated_worker import Health
from trioengine.testing.toy_weights import TOY_PATH

QUIET = (  # stages in which no request runs
    *(PowerStage.FALLING_ASLEEP, PowerStage.RETIRING, PowerStage.ASLEEP),
    *(PowerStage.UPDATING_ASLEEP, PowerStage.WAKING, PowerStage.UPDATING),
)
MODES = st.sampled_from(("abort", "wait", "keep", "keep", "wait soon"))
SLEEP_MODES = st.sampled_from(("abort", "wait", "keep", "keep", "wait soon", "abort in flight"))
SUSPENDED = (
    "wake",
    "wake",
    "drain",
    "drain soon",
    "abort all",
    "abort",
    "cancel",
    "end",
    "kill",
    "sleep",
)  # ways to go on, or not
CHANGES = ("sleep", "wake", "update")  # calls
DEATHS = 2  # without a token between them, which make a request a suspect
ROUNDS_TO_DIE = 120  # of a request that kills its workers, at most
READS = st.sampled_from((0, 1, 2, 4, 100))  # of states; 100 are more than there are
MOST_READERS = 3  # of states
ATTEMPTS = 6  # to wake in the end: a worker may be lost on the way


class PowerMachine(EngineMachine):
    """The rules of EngineMachine, and of the operator of the engine."""

    config = replace(CONFIG, adapters=ADAPTERS)

    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes(self.engine, self.faults)
        self.engine.observers += [self.changes, _Admissions(self)]
        self._ends_line = False  # the change that is requested in this step empties the lines
        self.faults.paths = self.changes.paths
        self._states = StateLog(self.engine)
        self._reading = Call(Life(self.faults), "states", self._states.run, ())
        self.loop.start_soon(self._reading.run, name="states")
        self._state_readers: list[StateReader] = []

    # ---- who runs the engine --------------------------------------------------------------------------------------

    @recorded(level=st.sampled_from((1, 2)), mode=SLEEP_MODES, turns=st.sampled_from((0, 0, 1, 8, 20)))
    def sleep(self, level: Literal[1, 2], mode: str, turns: int) -> None:
        """Sleep after some turns of the worker, whose messages are on their way then."""
        for _ in range(turns):
            self.loop.settle()
            if self.worker is not None:
                self.worker.receive()
                self.worker.turn()
        if self.worker is not None and inside.parked(self.worker):
            self.coverage.saw("sleep with a parked request")
        if self.worker is not None and self.worker.compiler:
            self.coverage.saw("sleep while a grammar compiles")
        self._sleep(level, mode)

    def _sleep(self, level: Literal[1, 2], mode: str) -> None:
        timeout = self._excuse_aborts(mode)
        if mode == "abort":
            self.faults.begin(Harm.SLEEP_EMPTIES_LINES)
        waits = mode == "abort in flight"
        call = functools.partial(self.engine.sleep, level, mode=_name(mode), timeout=timeout, keep_waiting=waits)
        self._change("sleep", call, level, mode=mode.split()[0], timeout=timeout, ends_line=mode == "abort")

    @recorded(tags=st.sampled_from((None, None, "weights", "kv_cache")), reload=st.sampled_from((True, True, False)))
    def wake(self, tags: TagName | None, reload: bool) -> None:
        self._change("wake", functools.partial(self.engine.wake, tags, reload=reload), tags, reload)

    @recorded(path=st.sampled_from(("new", TOY_PATH, *UNFIT)), mode=MODES)
    def update(self, path: str, mode: str) -> None:
        self._update(path, mode)

    def _update(self, path: str, mode: str) -> None:
        timeout = self._excuse_aborts(mode)
        call = functools.partial(self.engine.update_weights, path, mode=_name(mode), timeout=timeout)
        self._change("update", call, path, mode=mode.split()[0], timeout=timeout)

    @recorded(name=st.sampled_from(("one", "two")), version=st.integers(1, 2))
    def change_adapter(self, name: str, version: int) -> None:
        """Unload an adapter, which sessions may have, or load one of this name from another directory."""
        if name in self.engine.adapters:
            self.engine.unload_adapter(name)
        else:
            load = functools.partial(self.engine.load_adapter, name, f"adapters/{name}-{version}")
            self._call("load adapter", load, (RequestRejected, EngineOverloaded))

    @precondition(lambda self: self.open_holders and self.engine.state is Power.AWAKE)
    @recorded(
        which=WHICH, level=st.sampled_from((1, 2)), rounds=st.sampled_from((3, 8, 12)), way=st.sampled_from(SUSPENDED)
    )
    def suspend(self, which: int, level: Literal[1, 2], rounds: int, way: str) -> None:
        """A request is suspended by a sleep, which may not be done yet; and then something happens to it."""
        reader = self._read(which, Style.ALL, SamplingParams(max_tokens=20))
        self._flow(rounds)
        self._sleep(level, "keep")
        self._flow(rounds)
        match way:
            case "wake":
                self._change("wake", self.engine.wake, None, True)
            case "sleep":
                self._sleep(level, "abort")
            case "end":
                self._end(reader.holder)
            case "abort" | "cancel":
                self._stop(reader, way)
            case "kill" if self.worker is not None:
                self._kill(0)
            case "drain" | "drain soon" | "abort all":
                self._suffer(way)

    @precondition(lambda self: self.open_holders and self.engine.state is Power.AWAKE)
    @recorded(
        which=WHICH,
        grammar=st.sampled_from(GOOD),
        rounds=st.sampled_from((12, 16, 20, 26)),
        way=st.sampled_from(("kill", "sleep", "update", "update")),
    )
    def move_by_grammar(self, which: int, grammar: str, rounds: int, way: str) -> None:
        """An answer that follows a grammar goes on with another worker, after a sleep, or with other weights."""
        self._read(which, Style.ALL, SamplingParams(max_tokens=40, grammar=GRAMMARS[grammar].grammar))
        self._flow(rounds)
        self._change_worker(way)

    @precondition(lambda self: self.idle_holders and self.engine.state is Power.AWAKE)
    @recorded(
        which=st.integers(0, 2),
        use=st.sampled_from(CALLING),
        place=st.sampled_from(PLACES),
        way=st.sampled_from(("kill", "kill", "sleep", "update")),
    )
    def move_in_call(self, which: int, use: str, place: str, way: str) -> None:
        """The same of an answer that has come to a place in a call."""
        reader = self._call_tools(which, use, Style.ALL, SamplingParams(max_tokens=LONGEST))
        if found := self._flow_into_call(reader, place):
            self.coverage.saw(f"{way} {moment_of(found)}, which goes on")
            self._change_worker(way)

    def _change_worker(self, way: str) -> None:
        """An answer has to go on with another worker, or with other weights."""
        match way:
            case "kill" if self.worker is not None:
                self._kill(0)
            case "sleep":
                self._sleep(1, "keep")
                self._change("wake", self.engine.wake, None, True)
            case "update":
                self._update("new", "keep")

    @precondition(lambda self: self.in_use and (self.engine.power.asleep or self.changes.running))
    @recorded(way=st.sampled_from(("drain", "drain soon", "abort all", "abort in flight", "close")))
    def disturb(self, way: str) -> None:
        """The engine ends, or its requests do, while it sleeps or changes."""
        self._suffer(way)

    @precondition(lambda self: self.worker is not None)
    @recorded()
    def fail_wake(self) -> None:
        """The next wake fails."""
        self._worker().runner.fail_wakes += 1
        self.faults.begin(Harm.WAKES)

    @precondition(lambda self: self.worker is not None and self.engine.state is Power.AWAKE)
    @recorded(
        which=st.integers(0, 2),
        others=st.sampled_from((1, 1, 1, 0)),
        num_tokens=st.sampled_from((0, 0, 1, 3)),
        rounds=st.sampled_from((0, 1, 2, 4, 6)),
        change=st.sampled_from(("sleep", "update", "abort", "nothing", "nothing")),
    )
    def ask_for_death(self, which: int, others: int, num_tokens: int, rounds: int, change: str) -> None:
        """A request kills each worker which computes more than so many tokens of it, maybe beside good ones.

        Unless the rounds are 0, the engine changes so many rounds after the third worker is READY, or the oldest
        request is aborted while that worker starts, or nothing happens until the request that kills is over.
        """
        for _ in range(others + 1):
            if not self.idle_holders:
                self._open(None, None)
                self.loop.settle()
            if self.idle_holders:
                self._read(which, Style.ALL, SamplingParams(max_tokens=5))
                self.loop.settle()
        entered = [reader for reader in self.running_readers if reader.entered]
        if not entered or entered[-1].generation is None:
            return
        self.faults.begin(Harm.WORKERS)
        self.simulation.poisoned[entered[-1].generation.request_id] = num_tokens
        third = len(self.simulation.workers) + DEATHS
        if rounds and change == "abort":
            self._flow_until(lambda: len(self.simulation.workers) >= third)
            self._stop(entered[0], "abort")
        elif rounds and change == "nothing":
            self._flow_until(lambda: entered[-1].over)
        elif rounds:
            self._flow_until(lambda: len(self.simulation.workers) >= third and inside.has_worker(self.engine))
            self._flow(rounds)
            if change == "sleep":
                self._sleep(1, "keep")
            else:
                self._update(TOY_PATH, "keep")

    def _flow_until(self, is_done: Callable[[], bool]) -> None:
        """Go on through deaths of workers and their restarts, for ROUNDS_TO_DIE rounds at most."""
        for _ in range(ROUNDS_TO_DIE):
            if is_done():
                break
            self._flow(1)
            if self.worker is None:
                self._jump(max(self.config.restart_delays))

    @recorded(call=st.sampled_from(tuple(CALLS)))
    def misuse(self, call: str) -> None:
        """A call with an argument that is refused, in any state of the engine."""
        self._call("misuse", functools.partial(check_refused_call, self.engine, call), ())

    # ---- readers of its states --------------------------------------------------------------------------------------

    @precondition(lambda self: self._states.states and len(self._state_readers) < MOST_READERS)
    @recorded(count=READS, tries=st.booleans())
    def watch(self, count: int, tries: bool) -> None:
        """Another reader of the states."""
        reader = StateReader(self._states, tries)
        reader.allow(count)
        self._state_readers.append(reader)
        self.loop.start_soon(reader.run, name=f"states-{len(self._state_readers)}")

    @precondition(lambda self: self._state_readers)
    @recorded(which=WHICH, count=READS)
    def watch_on(self, which: int, count: int) -> None:
        """A reader of the states goes on; or leaves, where it is to read nothing."""
        reader = pick(self._state_readers, which)
        if count:
            reader.allow(count)
        else:
            reader.scope.cancel()

    # ---- overrides --------------------------------------------------------------------------------------------------

    def _excuse_aborts(self, mode: str) -> float | None:
        """A request in preparation is aborted in every mode. Returns the timeout."""
        self.faults.begin(Harm.SLEEP)
        if self.faults.closing:  # a drain during a change aborts suspended requests
            self.faults.begin(Harm.SHUTDOWN)
        if mode not in ("keep", "wait"):
            self.faults.begin(Harm.SLEEPS_ABORT)
        return 0.5 if mode == "wait soon" else None

    def _change(
        self,
        name: str,
        call: Callable[[], Awaitable[None]],
        *arguments: Any,
        mode: str = "keep",
        timeout: float | None = None,
        ends_line: bool = False,
    ) -> None:
        expect = functools.partial(self.changes.expect, name, *arguments, mode=mode, timeout=timeout)
        self._call(name, lambda: self._request_change(call, expect, ends_line), (TransitionFailed,))

    async def _request_change(
        self, call: Callable[[], Awaitable[None]], expect: Callable[[], None], ends_line: bool
    ) -> None:
        self._learn()  # requests that an earlier change has suspended do not finish before this one
        expect()
        self._ends_line = ends_line
        try:
            await call()
        finally:
            self.changes.forget_expected()

    def _begin_drain(self, drain: Callable[[float | None], Awaitable[Any]], timeout: float | None) -> None:
        """A drain during a change aborts suspended requests."""
        self._learn()
        changes = self.changes
        if changes.asleep or changes.running or any(call.name in CHANGES for call in self.running_calls):
            self.faults.begin(Harm.SHUTDOWN)
        super()._begin_drain(drain, timeout)

    def _check_blocked(self) -> None:
        super()._check_blocked()
        if self.engine.power.asleep and inside.power(self.engine) is Power.DRAINING:
            left = [each for each in inside.sessions(self.engine) if inside.phase(each) is Phase.SUSPENDED]
            assert not left, f"the engine drains asleep, and has not aborted {left}"
        stage, going = inside.stage(self.engine), inside.sessions(self.engine)
        awake = [each for each in going if inside.phase(each) is Phase.RUNNING] if stage in QUIET else ()
        assert not awake, f"the engine is {stage.value}, and requests run: {awake}"
        running = self.changes.running
        if running and running[0].name == "sleep" and inside.is_finishing(self.engine):
            seconds, timeout = trio.current_time() - self.changes.sleep_began, running[0].timeout
            assert timeout is None or seconds < timeout, f"requests have {timeout} s to finish, and took {seconds:g} s"

    def _waits(self) -> Iterator[Wait]:
        yield from super()._waits()
        running = self.changes.running
        if running and running[0].timeout is not None and inside.is_finishing(self.engine):
            yield Wait(running[0].made, running[0].timeout, f"{running[0].name} waits for the requests in flight")

    def _learn(self) -> None:
        self.changes.learn(self._excuse)

    def _excuse(self, change: Change) -> bool:
        """Whether a change may have failed."""
        harms = (Harm.WAKES,) if change.name in ("wake", "update") else ()
        may_fail = self.faults.hit(change.life, Harm.CLOSING, Harm.WORKERS, *harms)
        return may_fail or inside.power(self.engine) is Power.LOADING

    def _check(self) -> None:
        self._learn()
        super()._check()
        assert self._reading.over >= self.engine_call.over, "the engine is over, and its states go on"
        for reader in self._state_readers:
            reader.check(is_engine_over=self.engine_call.over)
        latest = self._states.states[-1]
        assert latest == self.engine.power, f"published was {latest}, and the engine is {self.engine.power}"
        if self.faults.closing or self.changes.running:
            return
        state, changes = self.engine.power, self.changes
        assert state.asleep == changes.asleep, f"{state} sleeps, {changes.asleep} must"
        assert state.weight_version == len(changes.paths) - 1, f"{state}, and there were {changes.paths}"
        weights = changes.paths[-1], len(changes.paths) - 1
        assert self.engine.weights == weights, f"the weights are {self.engine.weights}, and must be {weights}"
        assert (state.level or changes.level) == changes.level, f"{state}, asleep at {changes.level}"
        worker = self.worker
        if worker is not None and worker.health is Health.WELL and inside.has_worker(self.engine):
            found = worker.runner.asleep, worker.runner.path
            assert found == (changes.asleep, changes.paths[-1]), f"the worker has {found}, the engine is {state}"

    @property
    def _is_sleep_over(self) -> bool:
        is_called = any(call.name in CHANGES for call in self.running_calls)
        return super()._is_sleep_over and not self.changes.running and not is_called

    def _check_stuck(self) -> None:
        """At rest with a healthy worker, every change is done."""
        running = self.changes.running
        assert not running, f"nothing moves, and {running[0].name} is not done: {self.engine.power}"

    def _let_go(self) -> None:
        for worker in self.simulation.workers:
            worker.runner.fail_wakes = 0
        for _ in range(ATTEMPTS):
            self._run_out(lambda: not self.changes.running, lambda: f"never done: {self.changes.running[0]}")
            self._learn()
            if not self.changes.asleep or self.engine_call.over or self.faults.closing:
                break
            self._change("wake", self.engine.wake, None, True)
        super()._let_go()
        if any(reader.num_missed for reader in self._state_readers):
            self.coverage.saw("a reader of the states missed some")
        readers: list[Call | StateReader] = [self._reading, *self._state_readers]
        for reader in readers:
            reader.scope.cancel()
        self._run_out(
            lambda: all(reader.over for reader in readers), "the readers of the states were cancelled, and go on"
        )


def _name(mode: str) -> Literal["abort", "wait", "keep"]:
    """Of a mode that may be followed by its timeout."""
    return cast("Literal['abort', 'wait', 'keep']", mode.split()[0])


class _Admissions(Observer):
    """Checks that nothing is admitted from the step in which a sleep or an update is requested until all is awake."""

    def __init__(self, machine: PowerMachine) -> None:
        self._machine = machine

    def change_requested(self, change: object) -> None:
        """Raise if a sleep that aborts leaves callers in the lines, unless it is to keep them."""
        if self._machine._ends_line:
            self._machine._ends_line = False
            check_line(self._machine.engine)

    def slot_taken(self, slot: Slot, id: int) -> None:
        self._machine._learn()
        if self._machine.changes.is_closed:
            self._complain(f"{self._machine.engine.power} admits {id}")

    def slot_refused(self, slot: Slot, error: Exception) -> None:
        if not isinstance(error, EngineAsleep):
            return
        self._machine._learn()
        if not (self._machine.changes.may_be_closed or self._machine.faults.closing):
            self._complain(f"nothing sleeps, and {error!r}")

    def _complain(self, complaint: str) -> None:
        self._machine.loop.crashes.append(AssertionError(complaint))
