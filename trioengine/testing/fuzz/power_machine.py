"""An engine under hypothesis that sleeps, wakes and updates weights; requests outlive its workers."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.actors.gate import Gate
from trioengine.actors.power import DO_NOT_WAKE, PowerActor
from trioengine.actors.power_change import Level, ModeName
from trioengine.core.errors import EngineAsleep, TransitionFailed
from trioengine.core.lifecycle import Power
from trioengine.core.power import ALL_TAGS, Tag, TagName
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause
from trioengine.testing.fuzz.callers import Style
from trioengine.testing.fuzz.engine_machine import EngineMachine
from trioengine.testing.fuzz.oracles import check_line
from trioengine.testing.fuzz.payload_watch import parked
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.sessions_machine import WHICH
from trioengine.testing.fuzz.world import CONFIG
from trioengine.testing.simulated_worker import Health
from trioengine.testing.toy_model import TOY_PATH

UNFIT = ("other", "misshapen")  # paths at which no weights of the model lie


@dataclass
class Change:
    """One that was asked for; `made` is the engine's own record of it, which says when it is done."""

    name: str
    arguments: tuple[Any, ...]
    closes: bool  # admission, while it is not done
    made: Any

    @property
    def over(self) -> bool:
        return bool(self.made.done.is_set())

    @property
    def failure(self) -> TransitionFailed | None:
        failure: TransitionFailed | None = self.made.failure
        return failure


class Changes:
    """Those of one engine, and the model: what sleeps, at which level, and which weights there are."""

    def __init__(self) -> None:
        self.asked: list[Change] = []
        self.asleep: frozenset[Tag] = frozenset()
        self.level = 0
        self.paths = ["", "toy"]  # by version
        self.is_asking = False  # in this step, for what closes admission
        self._discarded = False
        self._awaits_update = False

    # ---- what is watched ------------------------------------------------------------------------------------------

    def of_sleeps(self, ask: Any) -> Any:
        """For `PowerActor.sleep`."""
        return self._watched(ask, "sleep", closes=True)

    def of_wakes(self, ask: Any) -> Any:
        """For `PowerActor.wake`."""
        return self._watched(ask, "wake", closes=False)

    def of_updates(self, ask: Any) -> Any:
        """For `PowerActor.update_weights`."""
        return self._watched(ask, "update", closes=True)

    def _watched(self, ask: Callable[..., Any], name: str, *, closes: bool) -> Any:
        def watched(actor: PowerActor, *args: Any, **more: Any) -> Any:
            self.is_asking = closes
            try:
                made = ask(actor, *args, **more)
            finally:
                self.is_asking = False
            self.asked.append(Change(name, (*args, *more.values()), closes, made))
            return made

        return watched

    @property
    def may_be_closed(self) -> bool:
        """Whether there is a reason to admit nothing."""
        return self.is_asking or bool(self.asleep or self.running)

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be admitted: something sleeps, or is to. A wake opens before it is done."""
        running = self.running
        return any(change.closes for change in running) or (bool(self.asleep) and not running)

    @property
    def running(self) -> list[Change]:
        return [change for change in self.asked if not change.over]

    # ---- the model ------------------------------------------------------------------------------------------------

    def learn(self, excuse: Callable[[Change], bool]) -> None:
        """Take in those that are done, in their order; one that failed must be excused, or impossible."""
        while self.asked and self.asked[0].over:
            change = self.asked.pop(0)
            impossible = self._impossible(change)
            if change.failure is None:
                assert impossible is None, f"{change.name}{change.arguments} was done, but {impossible}"
                self._do(change)
            else:
                assert impossible or excuse(change), f"{change.name}{change.arguments}: {change.failure!r}"
                if str(change.failure).startswith(DO_NOT_WAKE):
                    self._do(change)
                    self.asleep |= {Tag.WEIGHTS}

    def _impossible(self, change: Change) -> str | None:
        match change.name, change.arguments:
            case "sleep", (1, *_) if self.level == 2 and Tag.WEIGHTS in self.asleep:
                return "it sleeps deeper"
            case "update", (str(path), *_) if path in UNFIT:
                return "the weights do not fit"
        return None

    def _do(self, change: Change) -> None:
        match change.name, change.arguments:
            case "sleep", (int(level), *_):
                if (self.asleep, self.level) != (ALL_TAGS, level):
                    self._discarded = level == 2
                self._awaits_update = False
                self.asleep, self.level = ALL_TAGS, level
            case "wake", (tags, bool(reload)):
                named = (tags,) if isinstance(tags, str) else tags
                wanted = ALL_TAGS if named is None else frozenset(map(Tag, named))
                if self._discarded and not reload and wanted & self.asleep & {Tag.WEIGHTS}:
                    self._awaits_update = True
                    wanted -= {Tag.WEIGHTS}
                self.asleep -= wanted
                if Tag.WEIGHTS in wanted:
                    self._discarded = self._awaits_update = False
            case "update", (str(path), *_):
                self.paths.append(path)
                self._discarded = False
                if self._awaits_update:
                    self._awaits_update = False
                    self.asleep -= {Tag.WEIGHTS}


MODES = st.sampled_from(("abort", "wait", "keep", "keep", "wait soon"))
SLEEP_MODES = st.sampled_from(("abort", "wait", "keep", "keep", "wait soon", "abort in flight"))
CHANGES = ("sleep", "wake", "update")  # calls
ATTEMPTS = 6  # to wake in the end: a worker may be lost on the way


class PowerMachine(EngineMachine):
    """The rules of EngineMachine, and those of who runs the engine."""

    config = CONFIG

    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes()
        self._watch(PowerActor, "sleep", self._abort_the_lines)
        self._watch(PowerActor, "sleep", self.changes.of_sleeps)
        self._watch(PowerActor, "wake", self.changes.of_wakes)
        self._watch(PowerActor, "update_weights", self.changes.of_updates)
        self._watch(Gate, "admit_request", self._open_only)
        self._watch(Gate, "admit_session", self._open_only)
        self.troubles.paths = self.changes.paths

    # ---- who runs the engine --------------------------------------------------------------------------------------

    @recorded(level=st.sampled_from((1, 2)), mode=SLEEP_MODES, turns=st.sampled_from((0, 0, 1, 8, 20)))
    def sleep(self, level: Level, mode: str, turns: int) -> None:
        """What the worker says in its last turns is on its way then."""
        for _ in range(turns):
            self.loop.settle()
            if self.worker is not None:
                self.worker.receive()
                self.worker.turn()
        if self.worker is not None and parked(self.worker):
            self.rare.saw("sleep with a parked request")
        timeout = self._excuse_aborts(mode)
        waits = mode == "abort in flight"
        call = functools.partial(self.engine.sleep, level, mode=_name(mode), timeout=timeout, keep_waiting=waits)
        self._call("sleep", call, (TransitionFailed,))

    @recorded(tags=st.sampled_from((None, None, "weights", "kv_cache")), reload=st.sampled_from((True, True, False)))
    def wake(self, tags: TagName | None, reload: bool) -> None:
        call = functools.partial(self.engine.wake, tags, reload=reload)
        self._call("wake", call, (TransitionFailed,))

    @recorded(path=st.sampled_from(("new", TOY_PATH, *UNFIT)), mode=MODES)
    def update(self, path: str, mode: str) -> None:
        timeout = self._excuse_aborts(mode)
        call = functools.partial(self.engine.update_weights, path, mode=_name(mode), timeout=timeout)
        self._call("update", call, (TransitionFailed,))

    @precondition(lambda self: self.worker is not None)
    @recorded()
    def fail_wake(self) -> None:
        """The next wake fails."""
        self._worker().runner.fail_wakes += 1
        self.troubles.wakes = True

    @precondition(lambda self: self.open_holders)
    @recorded(which=WHICH, others=st.integers(0, 1), num_tokens=st.sampled_from((0, 0, 1, 3)))
    def ask_for_death(self, which: int, others: int, num_tokens: int) -> None:
        """A request that kills each worker which computes more than so many tokens of it, maybe after a good one."""
        for _ in range(others + 1):
            if self.open_holders:  # the engine may give up meanwhile
                self._read(which, Style.ALL, SamplingParams(max_tokens=5))
                self.loop.settle()
        generation = self.readers[-1].generation
        if generation is not None and self.readers[-1].entered:
            self.troubles.workers = True
            self.simulation.poisoned[generation.request_id] = num_tokens

    # ---- what the environment asks --------------------------------------------------------------------------------

    def _excuse_aborts(self, mode: str) -> float | None:
        """What is being prepared is aborted in every mode. Returns the timeout."""
        self.troubles.causes.add(Cause.SLEEP)
        if self.troubles.closing:  # a drain that comes upon a change ends what is suspended
            self.troubles.causes.add(Cause.SHUTDOWN)
        if mode != "keep":
            self.troubles.sleeps_abort = True
        return 0.5 if mode == "wait soon" else None

    def _abort_the_lines(self, sleep: Any) -> Any:
        """For `PowerActor.sleep`: one that aborts leaves nobody in the lines, unless it is to keep them."""

        def watched(actor: PowerActor, level: int, mode: str, timeout: float | None, *, keep_waiting: bool) -> Any:
            change = sleep(actor, level, mode, timeout, keep_waiting=keep_waiting)
            if mode == "abort" and not keep_waiting:
                check_line(self.engine)
            return change

        return watched

    def _open_only(self, admit: Any) -> Any:
        """For `Gate.admit_request` and `admit_session`: nobody is admitted while something sleeps, or is to."""

        def watched(gate: Gate) -> int:
            try:
                id: int = admit(gate)
            except EngineAsleep as exc:
                self._learn()
                if not (self.changes.may_be_closed or self.troubles.closing):
                    self.loop.crashes.append(AssertionError(f"nothing sleeps, and {exc!r}"))
                raise
            self._learn()
            if self.changes.is_closed:
                self.loop.crashes.append(AssertionError(f"{self.engine.power} admits {id}"))
            return id

        return watched

    def _begin_drain(self, drain: Callable[[float | None], Awaitable[Any]], timeout: float | None) -> None:
        """It ends what is suspended, but for what waits for another worker alone."""
        self._learn()
        changes = self.changes
        if changes.asleep or changes.running or any(call.name in CHANGES for call in self.running_calls):
            self.troubles.causes.add(Cause.SHUTDOWN)
        super()._begin_drain(drain, timeout)

    def _learn(self) -> None:
        self.changes.learn(self._excuse)

    def _excuse(self, change: Change) -> bool:
        """Whether a change may have failed."""
        if self.troubles.closing or self.troubles.workers or self.engine.gate.power is Power.LOADING:
            return True
        return change.name in ("wake", "update") and self.troubles.wakes

    def _check(self) -> None:
        self._learn()
        super()._check()
        if self.troubles.closing or self.changes.running:
            return
        state, changes = self.engine.power, self.changes
        assert state.asleep == changes.asleep, f"{state} sleeps, {changes.asleep} must"
        assert state.weight_version == len(changes.paths) - 1, f"{state}, and there were {changes.paths}"
        assert (state.level or changes.level) == changes.level, f"{state}, asleep at {changes.level}"
        worker = self.worker
        if worker is not None and worker.health is Health.WELL and self.engine.gate.link is not None:
            found = worker.runner.asleep, worker.runner.path
            assert found == (changes.asleep, changes.paths[-1]), f"the worker has {found}, the engine is {state}"

    def _check_stuck(self) -> None:
        """At rest with a healthy worker, every change is done."""
        running = self.changes.running
        assert not running, f"nothing moves, and {running[0].name} is not done: {self.engine.power}"

    def _let_go(self) -> None:
        for worker in self.simulation.workers:
            worker.runner.fail_wakes = 0
        for _ in range(ATTEMPTS):
            self._run_out(lambda: not self.changes.running, "a change is never done")
            self._learn()
            if not self.changes.asleep or self.engine_call.over or self.troubles.closing:
                break
            self._call("wake", self.engine.wake, (TransitionFailed,))
        super()._let_go()


def _name(mode: str) -> ModeName:
    """Of a mode that may be followed by its timeout."""
    return cast("ModeName", mode.split()[0])
