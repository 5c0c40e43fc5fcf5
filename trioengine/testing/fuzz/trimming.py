"""Leaves out of a program what it does not need to fail, where hypothesis' shrinking has stopped."""

from __future__ import annotations

from collections.abc import Callable

from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.program import Program, replay

Failed = tuple[Exception, Program]


def trimmed(make: Callable[[], Machine], failed: Failed) -> Failed:
    """A program of which no step can be left out, and how it fails; it may fail otherwise than the whole one did."""
    before = None
    while before is not failed[1]:
        before = failed[1]
        for index in reversed(range(len(before.steps))):
            steps = failed[1].steps
            failed = _run(make, Program(before.machine, steps[:index] + steps[index + 1 :])) or failed
    return failed


def _run(make: Callable[[], Machine], program: Program) -> Failed | None:
    """How it fails, with the steps that were possible; None if it does not."""
    machine = make()
    try:
        replay(machine, program)
    except Finding as finding:
        return finding.error, Program(program.machine, machine.program.steps)
    return None
