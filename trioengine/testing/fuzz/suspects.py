"""Suspect functions: where a program that fails takes steps that few passing programs take.

It is fault localization by coverage: such steps are near the bug, even if the failure itself is noticed much later. Of
functions with equally rare steps, those come first that have words of the failure and of the rules among their names.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.program import Program, UnknownStep, replay
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Report
from trioengine.testing.fuzz.trace import is_under_test
from trioengine.testing.fuzz.trimming import simpler
from trioengine.testing.sim_loop import Livelock

MOST_NEIGHBOURS = 20  # programs that are a little simpler than the one that fails
ORDINARY = 20  # programs that pass
A_SEED = 10  # of these
MOST_SEEDS = 10  # each of which ends at a program that fails
SLOWDOWN = 5  # by tracing, about
WORD = 0.2  # how much a word counts that one in e functions has
_WORD = re.compile(r"[A-Z]?[a-z]{4,}|[A-Z]{4,}")

Step: TypeAlias = tuple[CodeType, int, int]  # from one line of a function to another, or to the same
_Function: TypeAlias = tuple[str, str]  # file and name
_Tracer: TypeAlias = Callable[[FrameType, str, object], Any]


class Steps:
    """A context that takes down the steps of the code under test, which is neither a library's nor the kit's."""

    def __init__(self) -> None:
        self.order: dict[Step, None] = {}  # in the order of their first times
        self._before: Any = None
        self._in_repr: FrameType | None = None  # which the message of a failure calls
        self._is_traced: dict[str, bool] = {}  # by file

    def __enter__(self) -> None:
        self._before, self._in_repr = sys.gettrace(), None
        sys.settrace(self._begin)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _begin(self, frame: FrameType, event: str, argument: object) -> _Tracer | None:
        code = frame.f_code
        file = code.co_filename
        if file not in self._is_traced:
            self._is_traced[file] = is_under_test(file)
        if self._in_repr is not None or not self._is_traced[file]:
            return None
        if code.co_name == "__repr__":
            self._in_repr = frame
            return self._leave_repr
        before = frame.f_lineno

        def follow(frame: FrameType, event: str, argument: object) -> _Tracer:
            nonlocal before
            if event == "line":
                line = frame.f_lineno
                self.order[code, before, line] = None
                before = line
            return follow

        return follow

    def _leave_repr(self, frame: FrameType, event: str, argument: object) -> _Tracer:
        if event == "return":
            self._in_repr = None
        return self._leave_repr


@dataclass(frozen=True)
class Suspect:
    """A function with a step of the program that fails, and how many of the programs that pass took this step."""

    file: str
    function: str
    line: int
    times: int


@dataclass(frozen=True)
class Suspects:
    """The suspect functions, the most suspicious ones first, and of equals those with the latest steps."""

    functions: list[Suspect]
    num_programs: int  # that pass


def suspects(machine: type[Machine], program: Program) -> Suspects | None:
    """Compare the program, which failed, with its neighbours and with ordinary programs of its machine that pass.

    It returns None if the program does not fail again.
    """
    machine = machine.with_variant(program.variant)
    _run(machine, program)  # fills caches
    failure, failing = _run(machine, program)
    if failure is None:
        return None
    try:
        passing = [*_neighbours(machine, program), *_ordinary(machine)]
    except Livelock:
        passing = []  # others would take as long
    about = " ".join((str(failure), *(name for name, _ in program.steps)))
    return Suspects(_ranked(failing, passing, _words(about)), len(passing))


def _ranked(failing: Steps, passing: Sequence[Steps], about: set[str]) -> list[Suspect]:
    """The functions of the program that fails, which is described by these words."""
    times = Counter(step for steps in passing for step in steps.order)
    rarest: dict[_Function, Suspect] = {}
    words: defaultdict[_Function, set[str]] = defaultdict(set)
    latest_first = list(reversed(failing.order))
    for step in sorted(latest_first, key=lambda step: times[step]):
        code, _, line = step
        function = code.co_filename, code.co_qualname.partition(".<locals>.<")[0]
        rarest.setdefault(function, Suspect(*function, line, times[step]))
        words[function] |= _words(" ".join((Path(function[0]).stem, function[1], *code.co_names, *code.co_varnames)))
    weights = _weights(list(words.values()), about)

    def suspicion(function: _Function) -> float:
        likeness = math.fsum(weights.get(word, 0.0) for word in words[function])
        return (1 + WORD * likeness) / (1 + rarest[function].times)

    return [rarest[function] for function in sorted(rarest, key=suspicion, reverse=True)]


def _words(text: str) -> set[str]:
    """The words of a text, and of the names in it; without the s of a plural."""
    return {word.lower().removesuffix("s") for word in _WORD.findall(text)}


def _weights(functions: Sequence[set[str]], about: set[str]) -> dict[str, float]:
    """The weights of these words: the fewer functions have one, the more it counts."""
    frequencies = Counter(word for words in functions for word in words & about)
    return {word: math.log(len(functions) / frequency) for word, frequency in frequencies.items()}


def _traced(machine: type[Machine]) -> tuple[Machine, Steps]:
    made, steps = machine(), Steps()
    made.around_rules = steps
    made.longest *= SLOWDOWN
    return made, steps


def _run(machine: type[Machine], program: Program) -> tuple[Exception | None, Steps]:
    """The program's failure, and its steps up to then. Raises UnknownStep."""
    made, steps = _traced(machine)
    try:
        replay(made, program)
    except Finding as finding:
        return finding.error, steps
    return None, steps


def _neighbours(machine: type[Machine], program: Program) -> Iterator[Steps]:
    """The steps of those that pass. Raises Livelock."""
    shorter = [
        Program(program.machine, steps, program.variant)
        for index in reversed(range(len(program.steps)))
        for steps in simpler(program.steps, index, size=1)
    ]
    for each in filter(lambda each: each.steps, shorter[:MOST_NEIGHBOURS]):
        with suppress(UnknownStep):  # not all machines have passes
            failure, steps = _run(machine, each)
            if isinstance(failure, Livelock):
                raise failure
            if failure is None:
                yield steps


def _ordinary(machine: type[Machine]) -> list[Steps]:
    """The steps of those that pass, of the first seeds. Raises Livelock."""
    passed: list[Steps] = []
    latest = Steps()

    def make() -> Machine:
        nonlocal latest
        made, latest = _traced(machine)
        return made

    def note(report: Report) -> None:
        if not report.programs_to_find:
            passed.append(latest)

    for seed in range(MOST_SEEDS):
        report = Fuzzer(make, PROFILES["quick"], seed, note, shrink=False).run(examples=A_SEED)
        if isinstance(report.failure, Livelock):
            raise report.failure
        if len(passed) >= ORDINARY:
            break
    return passed
