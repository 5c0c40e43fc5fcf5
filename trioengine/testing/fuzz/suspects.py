"""Suspect functions: where a program that fails took steps that few programs take which pass.

It is fault localization by coverage: such steps are near the bug, even if the failure itself is noticed much later.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeAlias

from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.program import Program, replay
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer, Report, simpler
from trioengine.testing.fuzz.trace import is_under_test

MOST_NEIGHBOURS = 20  # programs that are a little simpler than the one that fails
ORDINARY = 10  # programs a seed
SEEDS = 2

Step: TypeAlias = tuple[CodeType, int, int]  # from one line of a function to another, or to the same
_Tracer: TypeAlias = Callable[[FrameType, str, object], Any]


class Steps:
    """A context that takes down the steps of the code under test, which is neither a library's nor the kit's."""

    def __init__(self) -> None:
        self.order: dict[Step, None] = {}  # in the order of their first times
        self._before: Any = None
        self._is_traced: dict[str, bool] = {}  # by file

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._begin)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _begin(self, frame: FrameType, event: str, argument: object) -> _Tracer | None:
        code = frame.f_code
        file = code.co_filename
        if file not in self._is_traced:
            self._is_traced[file] = is_under_test(file)
        if not self._is_traced[file] or code.co_name == "__repr__":  # which a failure calls
            return None
        before = frame.f_lineno

        def follow(frame: FrameType, event: str, argument: object) -> _Tracer:
            nonlocal before
            if event == "line":
                line = frame.f_lineno
                self.order[code, before, line] = None
                before = line
            return follow

        return follow


@dataclass(frozen=True)
class Suspect:
    """A function with a step of the program that fails, and how many of the programs that pass took this step."""

    file: str
    function: str
    line: int
    times: int


@dataclass(frozen=True)
class Suspects:
    """The suspect functions, with the rarest steps first, of which the latest."""

    functions: list[Suspect]
    num_programs: int  # that pass


def suspects(machine: type[Machine], program: Program) -> Suspects:
    """Compare the program, which fails, with its neighbours and with ordinary programs of its machine that pass."""
    machine = machine.with_variant(program.variant)
    _run(machine, program)  # fills caches
    failing = _run(machine, program)[1]
    passing = [steps for has_failed, steps in _neighbours(machine, program) if not has_failed]
    passing += [steps for seed in range(SEEDS) for steps in _ordinary(machine, seed)]
    times = Counter(step for steps in passing for step in steps.order)
    functions: dict[tuple[str, str], Suspect] = {}
    latest_first = list(reversed(failing.order))
    for step in sorted(latest_first, key=lambda step: times[step]):
        code, _, line = step
        name = code.co_qualname.partition(".<locals>.<")[0]
        functions.setdefault((code.co_filename, name), Suspect(code.co_filename, name, line, times[step]))
    return Suspects(list(functions.values()), len(passing))


def _run(machine: type[Machine], program: Program) -> tuple[bool, Steps]:
    """Whether the program fails, and its steps up to then."""
    made = machine()
    made.around_rules = steps = Steps()
    try:
        replay(made, program)
    except Finding:
        return True, steps
    return False, steps


def _neighbours(machine: type[Machine], program: Program) -> list[tuple[bool, Steps]]:
    shorter = [
        Program(program.machine, steps, program.variant)
        for index in reversed(range(len(program.steps)))
        for steps in simpler(program.steps, index, size=1)
    ]
    return [_run(machine, each) for each in shorter[:MOST_NEIGHBOURS] if each.steps]


def _ordinary(machine: type[Machine], seed: int) -> list[Steps]:
    """The steps of programs that a seed chooses, up to the first that fails."""
    passed: list[Steps] = []
    latest = Steps()

    def make() -> Machine:
        nonlocal latest
        made = machine()
        made.around_rules = latest = Steps()
        return made

    def note(report: Report) -> None:
        if not report.programs_to_find:
            passed.append(latest)

    Fuzzer(make, PROFILES["quick"], seed, note, shrink=False).run(examples=ORDINARY)
    return passed
