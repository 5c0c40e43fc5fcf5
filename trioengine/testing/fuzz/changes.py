"""A model of an engine's sleeps, wakes and updates, made one after the other, and of the admissions they permit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.observer import Observer, Slot
from trioengine.core.errors import EngineAsleep, TransitionFailed
from trioengine.core.lifecycle import PowerEvent, PowerStage
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.faults import InjectedFaults, Life
from trioengine.testing.fuzz.oracles import check_line

CLOSING = ("sleep", "update")  # changes that close the gate until they are done
UNFIT = ("other", "misshapen")  # paths at which no weights of the model lie


@dataclass
class Change:
    """A sleep, wake or update that was requested; `made` is the engine's own record of it."""

    name: str
    arguments: tuple[Any, ...]
    closes: bool  # admission, while it is not done
    made: Any
    life: Life
    timeout: float | None  # of the requests in flight
    to_end: list[inside.Request]  # requests that must not go on once it is done

    def __repr__(self) -> str:
        return f"<{self.made.name}>"

    @property
    def over(self) -> bool:
        return bool(self.made.done.is_set())

    @property
    def failure(self) -> TransitionFailed | None:
        failure: TransitionFailed | None = self.made.failure
        return failure


class Changes(Observer):
    """All changes of one engine, and a model of its state: sleeping tags, level of the sleep, and weights."""

    def __init__(self, engine: Engine, faults: InjectedFaults) -> None:
        self._engine = engine
        self._faults = faults
        self.requested: list[Change] = []
        self.asleep: frozenset[Tag] = frozenset()
        self.level = 0
        self.paths = ["", "toy"]  # by version
        self._expected: tuple[str, tuple[Any, ...], str, float | None] | None = None  # until the end of the step
        self._discarded = False
        self._awaits_update = False
        self.sleep_began = math.inf  # the latest one that lets requests finish

    # ---- events ---------------------------------------------------------------------------------------------------

    def expect(self, name: str, *arguments: Any, mode: str, timeout: float | None) -> None:
        """The current task is about to request this change, in this step."""
        self._expected = name, arguments, mode, timeout

    def forget_expected(self) -> None:
        """The request was refused, or is over."""
        self._expected = None

    def change_requested(self, change: object) -> None:
        assert self._expected is not None and isinstance(change, inside.PowerChange), "machines announce changes"
        name, arguments, mode, timeout = self._expected
        self._expected = None
        is_first = not (self.asleep or self.running)  # else a change before it may have suspended requests
        to_end = inside.in_flight(self._engine) if mode == "abort" or (mode == "wait" and is_first) else []
        self.requested.append(Change(name, arguments, name in CLOSING, change, Life(self._faults), timeout, to_end))

    def power_moved(self, stage: PowerStage, event: PowerEvent) -> None:
        if event is PowerEvent.SLEEP:
            self.sleep_began = trio.current_time()

    @property
    def may_be_closed(self) -> bool:
        """Whether there is a reason to admit nothing."""
        is_closing = self._expected is not None and self._expected[0] in CLOSING
        return is_closing or bool(self.asleep or self.running)

    @property
    def is_closed(self) -> bool:
        """Whether nothing may be admitted: something sleeps, or is to. A wake opens before it is done."""
        running = self.running
        return any(change.closes for change in running) or (bool(self.asleep) and not running)

    @property
    def running(self) -> list[Change]:
        return [change for change in self.requested if not change.over]

    # ---- the model ------------------------------------------------------------------------------------------------

    def learn(self, excuse: Callable[[Change], bool]) -> None:
        """Take in those that are done, in their order; one that failed must be excused, or impossible."""
        while self.requested and self.requested[0].over:
            change = self.requested.pop(0)
            impossible = self._impossible(change)
            if change.failure is None:
                assert impossible is None, f"{change.name}{change.arguments} was done, but {impossible}"
                left = [inside.session_of(each) for each in change.to_end if inside.is_going(each)]
                assert not left, f"{change.name}{change.arguments} was done, and {left} go on"
                self._do(change)
            else:
                assert impossible or excuse(change), f"{change.name}{change.arguments}: {change.failure!r}"
                if str(change.failure).startswith(inside.DO_NOT_WAKE):
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


class AdmissionWatch(Observer):
    """Checks that nothing is admitted from the step in which a sleep or an update is requested until all is awake."""

    def __init__(
        self,
        engine: Engine,
        changes: Changes,
        faults: InjectedFaults,
        crashes: list[Exception],
        learn: Callable[[], None],
    ) -> None:
        """`learn` takes in the changes that are done; complaints are added to the crashes."""
        self.ends_line = False  # the change that is requested in this step empties the lines
        self._engine = engine
        self._changes = changes
        self._faults = faults
        self._crashes = crashes
        self._learn = learn

    def change_requested(self, change: object) -> None:
        """Raise if a sleep that aborts leaves callers in the lines, unless it is to keep them."""
        if self.ends_line:
            self.ends_line = False
            check_line(self._engine)

    def slot_taken(self, slot: Slot, id: int) -> None:
        self._learn()
        if self._changes.is_closed:
            self._complain(f"{self._engine.power} admits {id}")

    def slot_refused(self, slot: Slot, error: Exception) -> None:
        if not isinstance(error, EngineAsleep):
            return
        self._learn()
        if not (self._changes.may_be_closed or self._faults.closing):
            self._complain(f"nothing sleeps, and {error!r}")

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))
