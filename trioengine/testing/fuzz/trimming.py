"""Makes a program shorter where hypothesis' shrinking has stopped: what it does not need to fail is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.program import ENVIRONMENT_RULES, Program, Step, replay

Failed = tuple[Exception, Program]
A_PASS: Step = ("tick", {"passes": 1, "order": 0})


def trimmed(make: Callable[[], Machine], failed: Failed) -> Failed:
    """A program of which no step can be left out, and how it fails; it may fail otherwise than the whole one did."""
    before = None
    while before is not failed[1]:
        before = failed[1]
        for index in reversed(range(len(before.steps))):
            attempts = (_run(make, Program(before.machine, steps)) for steps in _simpler(failed[1].steps, index))
            failed = next(filter(None, attempts), failed)
    return failed


def _simpler(steps: list[Step], index: int) -> Iterator[list[Step]]:
    """Without this step; with a mere pass of the scheduler in its place; two of these as one."""
    before, those, after = steps[:index], steps[index : index + 2], steps[index + 2 :]
    if not those:  # a shorter one was found since
        return
    yield [*before, *those[1:], *after]
    if those[0][0] not in ENVIRONMENT_RULES:
        yield [*before, A_PASS, *those[1:], *after]
    match those:
        case [("tick", {"passes": some, "order": 0}), ("tick", {"passes": more, "order": 0})]:
            yield [*before, ("tick", {"passes": some + more, "order": 0}), *after]


def _run(make: Callable[[], Machine], program: Program) -> Failed | None:
    """How it fails, with the steps that were possible; None if it does not, or the machine has no such rule."""
    machine = make()
    try:
        replay(machine, program)
    except Finding as finding:
        return finding.error, Program(program.machine, machine.program.steps)
    except ValueError:
        return None
    return None
