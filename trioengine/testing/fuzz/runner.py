"""Runs a machine under hypothesis for a time or a number of programs, and shortens the program that failed."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import get_state_machine_test

from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.program import BACKEND, Program, replay, seed_choices
from trioengine.testing.fuzz.trace import Trace
from trioengine.testing.fuzz.trimming import Enough, trimmed

MOST_INTERRUPTS = 30  # of slow rules until the search stops; and as many again until trimming stops
QUICK = 0.2  # seconds of the processor's time, after the first interrupt
MUCH_SLOWER = 5  # than any rule until then
LONG = 8  # rules of a program for which a shorter one is looked for,
MORE_PROGRAMS = 3  # among this many times the programs that were run before,
LEAST_PROGRAMS = 300  # but at least and at most so many,
MOST_PROGRAMS = 3000
ANOTHER_SEED = 1 << 32  # which is added to the seed
BATCH = 10  # programs of one configuration in a row, and between two looks at the clock
COLLECT_AFTER = 7_000  # objects: the garbage of a few programs


@dataclass(frozen=True)
class Profile:
    """How thorough a run is."""

    steps: int  # rules a program, at most


PROFILES = {"quick": Profile(steps=30), "deep": Profile(steps=80)}


@dataclass
class Report:
    """The result of a run; `failure` is set if it found one, and `program` as soon as a program has failed."""

    machine: str
    seed: int
    programs: int = 0
    passes: int = 0
    seconds: float = 0.0
    coverage: Counter[str] = field(default_factory=Counter)
    failure: Exception | None = None
    program: Program | None = None  # the shrunk one, in the end
    programs_to_find: int = 0
    seconds_to_find: float = 0.0


Progress = Callable[[Report], None]


class Fuzzer:
    """One run of a machine."""

    def __init__(
        self,
        machine: Callable[[], Machine],
        profile: Profile,
        seed: int,
        progress: Progress | None = None,
        *,
        shrink: bool = True,
        name: str | None = None,
    ) -> None:
        """`machine` makes one, as its type does; `name` is for the report, if `machine` has no `__name__`.

        A type runs with all its variants in turn.
        """
        self._variants: list[Callable[[], Machine]]
        self.report = Report(name or str(getattr(machine, "__name__", "Machine")), seed)
        self._machine = machine
        self._shrinks = shrink
        self._variants = [machine]
        if isinstance(machine, type) and issubclass(machine, Machine):
            self._variants = [machine.with_variant(number) for number in range(machine.num_variants)]
        self._current = self._variants[0]
        self._num_batches = 0
        self._profile = profile
        self._progress = progress
        self._began = time.monotonic()
        self._interrupts_left = MOST_INTERRUPTS
        self._longest = math.inf  # seconds of the processor's time that a rule may take
        self._slowest = 0.0  # seconds of the processor's time that a rule took
        self._findings: list[Finding] = []  # that have their tracebacks
        self._last: Program | None = None
        self._shortest: tuple[Exception, Program] | None = None  # of the programs that failed
        self._is_flaky = False  # the program that failed did not fail again

    def _make(self) -> Machine:
        if self._interrupts_left <= 0:
            raise Enough
        self._drop_tracebacks()
        machine = self._current()
        machine.on_end = self._count
        machine.longest = min(machine.longest, self._longest)
        return machine

    def _count(self, machine: Machine) -> None:
        if not machine.program.steps and machine.finding is None:  # it was left out
            return
        report = self.report
        self._slowest = max(self._slowest, machine.slowest)
        if machine.num_interrupts:
            self._interrupts_left -= machine.num_interrupts
            self._longest = max(QUICK, MUCH_SLOWER * self._slowest)
        report.programs += 1
        report.passes += machine.passes
        report.coverage.update(machine.coverage.counts)
        report.seconds = time.monotonic() - self._began
        if machine.finding is not None and not report.programs_to_find:
            report.programs_to_find, report.seconds_to_find = report.programs, report.seconds
            report.program = machine.program
        self._last = machine.program
        if machine.finding is not None and report.failure is None:  # later ones are the trimming's
            self._findings.append(machine.finding)
            if self._shortest is None or len(machine.program.steps) <= len(self._shortest[1].steps):
                self._shortest = machine.finding.error, machine.program
        if self._progress is not None:
            self._progress(report)

    def _drop_tracebacks(self) -> None:
        """Of all findings but the shortest: they hold machines, and hypothesis holds the findings."""
        for finding in self._findings:
            if finding.error not in (self.report.failure, self._shortest and self._shortest[0]):
                finding.let_go()
        self._findings = [finding for finding in self._findings if finding.error.__traceback__ is not None]

    def run(
        self,
        *,
        examples: int | None = None,
        seconds: float | None = None,
        until: Callable[[Report], bool] = lambda report: False,
    ) -> Report:
        """Run until something is found, or so many programs or seconds are over; shrinking may take longer.

        The run also ends when `until` returns True, which is called after every BATCH programs. If `progress` raises
        KeyboardInterrupt, it propagates, and the finding of a program that ran before is in `report`.
        """
        report = self.report
        seed_choices(report.seed)
        with _fewer_collections():
            while report.failure is None and not self._is_over(examples, seconds) and not until(report):
                count = BATCH if examples is None else min(BATCH, examples - report.programs)
                self._run_batch(count)
            if self._shrinks and report.failure is not None and not self._is_flaky:
                self._trim()
                if report.program is not None and report.program.length > LONG:
                    self._look_for_a_shorter_one()
        report.seconds = time.monotonic() - self._began
        return report

    def _trim(self) -> None:
        """Shorten the program that failed."""
        report = self.report
        assert report.failure is not None and report.program is not None, "a program has failed"
        self._interrupts_left, self._shortest = MOST_INTERRUPTS, None
        self._drop_tracebacks()
        report.failure, report.program = trimmed(self._make, (report.failure, report.program))

    def _look_for_a_shorter_one(self) -> None:
        """Where the first program that failed is still long, another one may fail that is short."""
        report = self.report

        def show(_: Report) -> None:
            if self._progress is not None:
                self._progress(report)

        another = Fuzzer(self._machine, self._profile, report.seed + ANOTHER_SEED, show, shrink=False)
        found = another.report
        with contextlib.suppress(Exception, Enough):  # the first finding counts
            another.run(examples=min(max(MORE_PROGRAMS * report.programs_to_find, LEAST_PROGRAMS), MOST_PROGRAMS))
            if found.failure is not None and not another._is_flaky:
                another._trim()
        report.programs += found.programs
        report.passes += found.passes
        if found.failure is None or another._is_flaky or found.program is None or report.program is None:
            return
        if found.program.length < report.program.length:
            report.failure, report.program = found.failure, found.program

    def _is_over(self, examples: int | None, seconds: float | None) -> bool:
        is_over = examples is not None and self.report.programs >= examples
        return is_over or (seconds is not None and time.monotonic() - self._began >= seconds)

    def _run_batch(self, count: int) -> None:
        """Run so many programs, with one of the machine's configurations after the other."""
        self._current = self._variants[self._num_batches % len(self._variants)]
        self._num_batches += 1
        test = get_state_machine_test(
            cast("type[Machine]", self._make),  # any function that makes one will do
            settings=settings(
                max_examples=count,
                stateful_step_count=self._profile.steps,
                deadline=None,
                database=None,
                backend=BACKEND,
                derandomize=False,  # also in CI: our seed counts
                report_multiple_bugs=False,
                print_blob=False,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.quiet,
            ),
        )
        try:
            hypothesis.seed(self.report.seed)(test)()
        except Finding as finding:
            assert self._last is not None, "a machine that found something has been counted"
            self.report.failure, self.report.program = finding.error, self._last
        except (Flaky, KeyboardInterrupt, Enough) as exc:  # it is not shrunk yet, or failed only once: nothing is lost
            if self._shortest is not None:
                self.report.failure, self.report.program = self._shortest
            if isinstance(exc, KeyboardInterrupt) or self._shortest is None:
                raise
            self._is_flaky = isinstance(exc, Flaky) and self._interrupts_left > 0  # else hypothesis made it of Enough


class Replayed(NamedTuple):
    """A program that ran again on a fresh machine, and its failure if there is one."""

    machine: Machine
    failure: Exception | None
    trace: Trace


def replayed(make: Callable[[], Machine], program: Program) -> Replayed:
    """Run a program on a fresh machine, with a trace. Raises UnknownStep."""
    machine = make()
    trace = machine.record()
    try:
        replay(machine, program)
    except Finding as finding:
        return Replayed(machine, finding.error, trace)
    return Replayed(machine, None, trace)


@contextlib.contextmanager
def _fewer_collections() -> Iterator[None]:
    """A program leaves little garbage that is cyclic; looking for it all the time costs a sixth of the rate."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Within, the engine's log goes to the handlers of machines alone, which get its errors.

    Logs of programs go where these have sent them, and not to stderr by default.
    """
    logger = logging.getLogger("trioengine")
    before = logger.level, logger.propagate, logger.handlers
    last_resort, logging.lastResort = logging.lastResort, logging.NullHandler()
    logger.setLevel(logging.ERROR)
    logger.propagate, logger.handlers = False, [logging.NullHandler()]
    try:
        yield
    finally:
        logger.setLevel(before[0])
        _, logger.propagate, logger.handlers = before
        logging.lastResort = last_resort
