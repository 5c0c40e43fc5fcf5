"""The operator of an engine under hypothesis: sleeps, wakes, updates and adapters, and their checks."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, cast

import trio
from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.core.errors import EngineOverloaded, RequestRejected, TransitionFailed
from trioengine.core.lifecycle import Phase, Power, PowerStage
from trioengine.core.power import TagName
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.calls_machine import WHICH
from trioengine.testing.fuzz.changes import UNFIT, AdmissionWatch, Change, Changes
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.faults import Harm
from trioengine.testing.fuzz.misuse import CALLS, check_refused_call
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.promptness import Wait
from trioengine.testing.fuzz.sessions_machine import ADAPTERS
from trioengine.testing.fuzz.state_readers import StateReaders
from trioengine.testing.fuzz.world import CONFIG
from trioengine.testing.simulated_worker import Health
from trioengine.testing.toy_weights import TOY_PATH

QUIET = (  # stages in which no request runs
    *(PowerStage.FALLING_ASLEEP, PowerStage.RETIRING, PowerStage.ASLEEP),
    *(PowerStage.UPDATING_ASLEEP, PowerStage.WAKING, PowerStage.UPDATING),
)
MODES = st.sampled_from(("abort", "wait", "keep", "keep", "wait soon"))
SLEEP_MODES = st.sampled_from(("abort", "wait", "keep", "keep", "wait soon", "abort in flight"))
CHANGES = ("sleep", "wake", "update")  # calls
READS = st.sampled_from((0, 1, 2, 4, 100))  # of states; 100 are more than there are
ATTEMPTS = 6  # to wake in the end: a worker may be lost on the way


class OperatorMachine(EngineMachine):
    """The rules of EngineMachine, and of the operator, whose calls meet whatever else happens."""

    config = replace(CONFIG, adapters=ADAPTERS)

    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes(self.engine, self.faults)
        self._admission_watch = AdmissionWatch(self.engine, self.changes, self.faults, self.loop.crashes, self._learn)
        self.engine.observers += [self.changes, self._admission_watch]
        self.faults.paths = self.changes.paths
        self._states = StateReaders(self.engine, self.faults, self.loop)

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

    @precondition(lambda self: self.worker is not None)
    @recorded()
    def fail_wake(self) -> None:
        """The next wake fails."""
        self._worker().runner.fail_wakes += 1
        self.faults.begin(Harm.WAKES)

    @precondition(lambda self: self.in_use and (self.engine.power.asleep or self.changes.running))
    @recorded(way=st.sampled_from(("drain", "drain soon", "abort all", "abort in flight", "close")))
    def disturb(self, way: str) -> None:
        """The engine ends, or its requests do, while it sleeps or changes."""
        self._suffer(way)

    @recorded(call=st.sampled_from(tuple(CALLS)))
    def misuse(self, call: str) -> None:
        """A call with an argument that is refused, in any state of the engine."""
        self._call("misuse", functools.partial(check_refused_call, self.engine, call), ())

    # ---- readers of its states --------------------------------------------------------------------------------------

    @precondition(lambda self: self._states.may_add)
    @recorded(count=READS, tries=st.booleans())
    def watch(self, count: int, tries: bool) -> None:
        """Another reader of the states."""
        self._states.add(count, tries=tries)

    @precondition(lambda self: self._states.readers)
    @recorded(which=WHICH, count=READS)
    def watch_on(self, which: int, count: int) -> None:
        """A reader of the states goes on; or leaves, where it is to read nothing."""
        reader = pick(self._states.readers, which)
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
        self._admission_watch.ends_line = ends_line
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
        self._states.check(is_engine_over=self.engine_call.over)
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
        if self._states.have_missed:
            self.coverage.saw("a reader of the states missed some")
        self._states.cancel()
        self._run_out(lambda: self._states.are_over, "the readers of the states were cancelled, and go on")


def _name(mode: str) -> Literal["abort", "wait", "keep"]:
    """Of a mode that may be followed by its timeout."""
    return cast("Literal['abort', 'wait', 'keep']", mode.split()[0])
