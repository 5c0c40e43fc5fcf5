"""The fuzzer on the core alone: it finds nothing, takes every transition, and finds the mutants of table and books."""

import pytest
from mutants import MUTANTS

from trioengine.core.lifecycle import SESSION_TRANSITIONS, Attachment, Phase
from trioengine.testing.fuzz.core_machine import CoreMachine
from trioengine.testing.fuzz.machine import session_state
from trioengine.testing.fuzz.program import Program, ReplayFile, replay
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer

PROGRAMS = 500
MANY = 2000  # programs, of which some reach each rare state
GONE = (Phase.ENDED, Attachment.DETACHED)  # the session has ended, and the worker knows nothing of it
IN_REACH = ("F2", "F7", "F8", "F28", "F41")  # what is wrong in the table or in the books
RARE = {
    "a stop crosses the finish",
    "an end crosses the finish",
    "a worker's last frame is torn",
    "a worker dies with bytes on their way to it",
}


@pytest.fixture(scope="module")
def report():
    return Fuzzer(CoreMachine, PROFILES["quick"], seed=2).run(examples=MANY)


def test_nothing_is_found(report):
    assert report.failure is None, f"{report.failure!r}\n{report.program}"
    assert report.programs >= MANY


def test_every_transition_is_taken(report):
    """None is out of reach here: whoever holds a session that is gone may still abort and end it."""
    missed = {session_state(*key) for key in SESSION_TRANSITIONS} | RARE
    missed -= set(report.coverage)
    assert not missed, f"never reached: {sorted(missed)}"


@pytest.mark.parametrize("mutant", IN_REACH)
def test_each_mutant_is_found(mutant):
    """And the same program without it is harmless."""
    with MUTANTS[mutant].active():
        report = Fuzzer(CoreMachine, PROFILES["quick"], 0, shrink=False).run(examples=PROGRAMS)
    assert report.failure is not None, f"not found in {report.programs} programs"
    replay(CoreMachine(), ReplayFile.from_json(report.program.to_json()).program)


def test_a_replay_sends_the_same_bytes():
    steps = [
        ("begin", {"sessions": 2, "turns": 1}),
        ("reserve", {"which": 0, "commit": True}),
        ("move", {"way": "down", "count": 30}),
        ("abort", {"which": 0}),
        ("settle", {}),
    ]
    machines = [CoreMachine() for _ in range(2)]
    for machine in reversed(machines):  # they watch the tables one within the other
        replay(machine, Program("CoreMachine", steps))
    replay(other := CoreMachine(), Program("CoreMachine", steps[:-2]))
    assert machines[0].checksum == machines[1].checksum != other.checksum
