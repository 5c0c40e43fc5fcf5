"""Steps that a program does not need to fail are left out of it."""

from mutants import MUTANTS

from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.program import Program, replay
from trioengine.testing.fuzz.runner import silence, trimmed

OPEN, SETTLE = ("open", {"wait": True}), ("settle", {})
ASK = ("ask", {"which": 0, "max_tokens": 2, "reads": True})
STEPS = [
    ("begin", {"ready": True, "sessions": 2, "turns": 0, "asks": 0, "thread_passes": 1}),
    ("tick", {"passes": 2, "order": 0}),
    SETTLE,
    OPEN,
    ("outage", {"way": "abort all"}),
    SETTLE,
    ASK,
    ("advance", {"seconds": 0.2}),
    ("leave", {"which": 0, "what": "end"}),
    ASK,
    SETTLE,
    SETTLE,
]


def test_what_is_left_fails_and_needs_every_step():
    make, mutant = MACHINES["EngineMachine"], MUTANTS["F25"]
    with silence(), mutant.active():
        error, program = trimmed(make, (ValueError("as it was found"), Program("EngineMachine", STEPS)))
        assert mutant.explains(error)
        assert 1 < len(program.steps) < 5
        for index in range(len(program.steps)):
            assert fails(make, program.steps) and not fails(make, program.steps[:index] + program.steps[index + 1 :])


def fails(make, steps):
    try:
        replay(make(), Program("EngineMachine", steps))
    except Exception:
        return True
    return False


def test_a_program_that_does_not_fail_stays_as_it_was():
    failed = ValueError("once"), Program("EngineMachine", STEPS)
    with silence():
        assert trimmed(MACHINES["EngineMachine"], failed) is failed


def test_a_step_that_only_lets_a_pass_go_by_is_one():
    steps = [
        ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 1, "thread_passes": 1}),
        *[("advance", {"seconds": 0.2})] * 10,
        ("flow", {"rounds": 5}),
        ("stop_reading", {"what": "abort", "which": 0}),
        ("stop_reading", {"what": "fail", "which": 0}),
        ("flow", {"rounds": 1}),
    ]
    with silence(), MUTANTS["F4"].active():
        assert fails(MACHINES["EngineMachine"], steps)
        _, program = trimmed(MACHINES["EngineMachine"], (ValueError("found"), Program("EngineMachine", steps)))
    assert "advance" not in [name for name, _ in program.steps]
    assert program.length <= 4
