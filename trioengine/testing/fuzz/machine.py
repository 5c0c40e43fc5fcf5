"""Base class of the machines: records rules, counts covered states, and raises findings."""

from __future__ import annotations

import gc
import inspect
import math
import signal
import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self

import hypothesis
import outcome
import trio
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine

from trioengine.actors.observer import Observer
from trioengine.core.lifecycle import (
    POWER_TRANSITIONS,
    SESSION_TRANSITIONS,
    Attachment,
    Event,
    Phase,
    PowerEvent,
    PowerStage,
)
from trioengine.testing import sim_loop
from trioengine.testing.fuzz.program import Program, RuleSwarm
from trioengine.testing.fuzz.trace import Trace, is_library
from trioengine.testing.sim_loop import Livelock

_FRAGILE = (
    *(f"{Path(each.__file__ or '').parent}/" for each in (trio, outcome, hypothesis)),
    sim_loop.__file__,
    *(str(Path(__file__).with_name(name)) for name in ("suspects.py", "trace.py")),  # a tracer runs in all frames
)
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
LONGEST = 2.0  # seconds of the processor's time: a hundred times more than any rule needs


class Coverage(Observer):
    """Counts how often each state was reached: the transitions of the lifecycle tables, and those that rules name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def saw(self, state: str) -> None:
        """A state was reached."""
        self.counts[state] += 1

    def session_moved(self, actor: object, phase: Phase, attachment: Attachment, event: Event) -> None:
        self.counts[session_state(phase, attachment, event)] += 1

    def power_moved(self, stage: PowerStage, event: PowerEvent) -> None:
        self.saw(power_state(stage, event))


def session_state(phase: Phase, attachment: Attachment, event: Event) -> str:
    """The name of a transition of a session."""
    return _SESSION_STATES[phase, attachment, event]


def power_state(stage: PowerStage, event: PowerEvent) -> str:
    """The name of a transition of the engine."""
    return f"engine {stage.value}: {event.value}"


_SESSION_STATES = {
    (phase, attachment, event): f"session {phase.value}, {attachment.value}: {event.value}"
    for phase in Phase
    for attachment in Attachment
    for event in Event
}

TABLE_STATES = frozenset(_SESSION_STATES[key] for key in SESSION_TRANSITIONS) | frozenset(
    power_state(stage, event) for stage, row in POWER_TRANSITIONS.items() for event in row
)


class Finding(Exception):
    """A program failed with `error`. For hypothesis all are alike, so it looks for the shortest program of any."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error

    def let_go(self) -> None:
        """Drop the tracebacks, whose frames hold the machine."""
        self.__traceback__ = None
        error: BaseException | None = self.error
        seen: set[int] = set()  # ids: an error may be its own cause
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            error = error.__cause__ or error.__context__


class Machine(RuleBasedStateMachine):
    """Its rules are under `@recorded`. A failure, in a rule or in the end, is raised once: as a Finding.

    `reachable` has the transitions of the lifecycle tables that its programs can take. `variant` is the number of the
    configuration, of `num_variants`. A rule is interrupted when it has taken `longest` seconds of the processor's time,
    and again after each `longest` more; `math.inf` switches this limit off.
    """

    longest = LONGEST

    reachable: ClassVar[AbstractSet[str]] = frozenset()
    num_variants: ClassVar[int] = 1
    variant: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        # hypothesis' own name, and private: tests/testing/test_swarm.py fails if it changes
        self._rules_strategy = RuleSwarm(self, self._cut_off)
        self.program = Program(type(self).__name__, variant=self.variant)
        self.coverage = Coverage()
        self._taps = ExitStack()  # contexts that are left in the end
        self.around_rules: AbstractContextManager[object] = nullcontext()  # entered for each rule, and for `_finish`
        self.finding: Finding | None = None
        self.trace: Trace | None = None  # kept since `record`
        self.on_end: Callable[[Machine], None] | None = None  # called with the machine after every end
        self.num_interrupts = 0  # of rules that took too long
        self.slowest = 0.0  # seconds of the processor's time that a rule took, and was not interrupted
        self._is_cut_off = False
        self._time_limit = _TimeLimit(self)

    @classmethod
    def with_variant(cls, variant: int) -> type[Self]:
        """Return the machine with another configuration. Raises ValueError if no variant has this number."""
        if not 0 <= variant < cls.num_variants:
            raise ValueError(f"{cls.__name__} has {cls.num_variants} variants, and none with the number {variant}")
        return type(cls.__name__, (cls,), {"variant": variant, "__module__": cls.__module__}) if variant else cls

    # ---- for machines ---------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        """Scheduler passes that were run."""
        return 0

    @property
    def seconds(self) -> float:
        """Simulated time that has passed."""
        return 0.0

    @property
    def checksum(self) -> str:
        """Equal in two runs that took the same steps."""
        return ""

    def record(self) -> Trace:
        """Begin a trace, before the first rule."""
        self.trace = Trace(lambda: (self.passes, self.seconds))
        return self.trace

    def _finish(self) -> None:
        """The end of a program in which nothing was found: all callers leave, and nothing may be left."""

    def _close(self) -> None:
        """Clean up, after a failure as well."""

    # ---- for hypothesis -------------------------------------------------------------------------------------------

    def take_down(self, name: str, arguments: dict[str, Any]) -> None:
        """Add a rule that is about to run to the program."""
        self.program.steps.append((name, arguments))
        if self.trace is not None:
            self.trace.rule(name, arguments)

    def act(self, rule: Callable[[], None]) -> None:
        """Run a rule."""
        self._try(rule)
        self._report()

    def teardown(self) -> None:
        is_new = self.finding is None  # else it was reported by the rule that found it
        try:
            if is_new and not self._is_cut_off:
                if self.trace is not None:
                    self.trace.add("the end")
                self._try(self._finish)
        finally:
            self.around_rules = nullcontext()
            try:
                self._try(self._close)
            finally:
                self._taps.close()
                if self.finding is not None and isinstance(self.finding.error, Livelock):
                    gc.collect()  # a loop that does not end may leave a few large objects
                if self.on_end is not None:
                    self.on_end(self)
        if is_new:
            self._report()

    def _cut_off(self) -> None:
        """Nothing more is found."""
        self._is_cut_off = True

    def _try(self, step: Callable[[], None]) -> None:
        try:
            with self._time_limit, self.around_rules:
                step()
        except HypothesisException:
            raise
        except Exception as exc:
            if not self._is_cut_off and self.finding is None:
                self.finding = Finding(_leaf(exc))
                if self.trace is not None:
                    self.trace.end()
        except BaseException:
            self._is_cut_off = True
            raise

    def _report(self) -> None:
        """From this one place, and outside of any handler: hypothesis compares where exceptions come from."""
        if self.finding is not None:
            raise self.finding


class _TimeLimit:
    """In the main thread, interrupts a rule of a machine that runs for too long, again and again until it ends.

    The handler of the signal is set once and stays: to set it takes longer than most rules, and machines overlap.
    """

    running: ClassVar[Machine | None] = None  # the machine whose rule runs: a process has one handler

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __enter__(self) -> None:
        if _in_main_thread():
            if signal.getsignal(signal.SIGVTALRM) is not _interrupt:
                signal.signal(signal.SIGVTALRM, _interrupt)
            _TimeLimit.running = self._machine
            if math.isfinite(self._machine.longest):
                signal.setitimer(signal.ITIMER_VIRTUAL, self._machine.longest, self._machine.longest)

    def __exit__(self, *_: object) -> None:
        if _in_main_thread():
            seconds_left, _interval = signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            _TimeLimit.running = None
            if not self._machine.num_interrupts and math.isfinite(self._machine.longest):
                self._machine.slowest = max(self._machine.slowest, self._machine.longest - seconds_left)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _interrupt(_: int, frame: FrameType | None) -> None:
    machine = _TimeLimit.running
    if machine is None:  # the timer went off as it was stopped
        return
    if _would_break(frame):
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, machine.longest)
        return
    machine.num_interrupts += 1
    raise Livelock("a task has run without a checkpoint, and let no other one run")


def _would_break(frame: FrameType | None) -> bool:
    """Whether an exception from here would break a loop or be lost, unlike one in a task or in a check."""
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_FRAGILE):
            return True
        if frame.f_code.co_flags & _ASYNC:
            return False  # it is in a task
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename.startswith(_FRAGILE)


def _leaf(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
