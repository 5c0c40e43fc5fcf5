"""Shortens a program that fails, and makes its arguments simple."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.program import (
    ENVIRONMENT_RULES,
    JUMPS,
    Program,
    Step,
    UnknownStep,
    replay,
    simpler_arguments,
)
from trioengine.testing.sim_loop import Livelock

Failed: TypeAlias = tuple[Exception, Program]
A_PASS: Step = ("tick", {"passes": 1, "order": 0})


class Enough(BaseException):
    """Too many rules were interrupted: it ends the search or the trimming. Hypothesis does not catch it."""


def trimmed(make: Callable[[], Machine], failed: Failed) -> Failed:
    """A program of which no step can be left out, with simple arguments, and how it fails: at the same place."""
    trimming = _Trimming(make, failed)
    with contextlib.suppress(Enough):
        trimming.leave_out()
        trimming.simplify()
        trimming.leave_out()  # simple steps may need fewer others
    return trimming.failed


class _Trimming:
    """The shortest program so far that fails at the same place; other findings, which hold machines, let go."""

    def __init__(self, make: Callable[[], Machine], failed: Failed) -> None:
        self.failed = failed
        self._finding: Finding | None = None  # of `failed`, if it was shortened
        self._make = make
        self._place = _place_of(failed[0])
        self._kind: type[Machine] = Machine  # once a program has run

    def leave_out(self) -> None:
        """Leave out as many steps as possible: halves, quarters, and so on, until no single one can be left out."""
        before, size = None, len(self.failed[1].steps)
        while size > 1 or before is not self.failed[1]:
            before, size = self.failed[1], max(1, size // 2)
            for index in reversed(range(0, len(before.steps), size)):
                any(self._fails(steps) for steps in simpler(self.failed[1].steps, index, size))

    def simplify(self) -> None:
        """Give each argument the simplest value that is found with which the program fails."""
        for index in reversed(range(len(self.failed[1].steps))):
            steps = self.failed[1].steps
            if index < len(steps):  # else a step before it was left out, as one that could not run any more
                for name in steps[index][1]:
                    while any(self._fails(each) for each in self._with_simpler(index, name)):
                        pass

    def _with_simpler(self, index: int, name: str) -> Iterator[list[Step]]:
        steps = self.failed[1].steps
        if index >= len(steps):
            return
        rule, arguments = steps[index]
        for value in simpler_arguments(self._kind, rule, name, arguments[name]):
            yield [*steps[:index], (rule, arguments | {name: value}), *steps[index + 1 :]]

    def _fails(self, steps: list[Step]) -> bool:
        """Whether these steps fail at the same place; then they are the shortest."""
        program, machine = self.failed[1], self._make()
        self._kind = type(machine)
        try:
            replay(machine, Program(program.machine, steps, program.variant))
        except Finding as finding:
            if _place_of(finding.error) != self._place:
                finding.let_go()
            else:
                if self._finding is not None:
                    self._finding.let_go()
                self._finding = finding
                self.failed = finding.error, Program(program.machine, machine.program.steps, program.variant)
                return True
        except UnknownStep:
            pass
        return False


def _place_of(error: Exception) -> tuple[object, ...]:
    """The type of an error and the line that raised it; of an interrupt, which may come anywhere, the type alone."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or isinstance(error, Livelock):
        return (type(error),)
    return type(error), last.tb_frame.f_code.co_filename, last.tb_lineno


def simpler(steps: list[Step], index: int, size: int) -> Iterator[list[Step]]:
    """Without so many steps at `index`; for one, with a mere pass in its place; two passes, or two jumps, as one."""
    if index >= len(steps):  # a shorter one was found since
        return
    if size > 1:
        yield steps[:index] + steps[index + size :]
        return
    before, those, after = steps[:index], steps[index : index + 2], steps[index + 2 :]
    yield [*before, *those[1:], *after]
    if those[0][0] not in ENVIRONMENT_RULES:
        yield [*before, A_PASS, *those[1:], *after]
    match those:
        case [("tick", {"passes": some, "order": 0}), ("tick", {"passes": more, "order": 0})]:
            yield [*before, ("tick", {"passes": some + more, "order": 0}), *after]
        case [("advance", {"seconds": some}), ("advance", {"seconds": more})]:
            longer = min((each for each in JUMPS if each >= some + more), default=max(JUMPS))
            yield [*before, ("advance", {"seconds": longer}), *after]
