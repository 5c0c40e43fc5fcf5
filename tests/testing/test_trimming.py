"""Steps that a program does not need to fail are left out of it."""

import pytest
from hypothesis import strategies as st
from mutants import MUTANTS

from trioengine.testing.fuzz.machine import Finding, Machine
from trioengine.testing.fuzz.machines import MACHINES
from trioengine.testing.fuzz.program import Program, recorded, replay
from trioengine.testing.fuzz.runner import BATCH, LONG, PROFILES, Fuzzer, silence
from trioengine.testing.fuzz.trimming import Enough, trimmed

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
        error, program = trimmed(make, (failure_of(make, STEPS), Program("EngineMachine", STEPS)))
        assert mutant.explains(error)
        assert 1 < len(program.steps) < 5
        for index in range(len(program.steps)):
            assert failure_of(make, program.steps)
            assert not failure_of(make, program.steps[:index] + program.steps[index + 1 :])


def failure_of(make, steps):
    try:
        replay(make(), Program("EngineMachine", steps))
    except Finding as finding:
        return finding.error
    return None


def test_a_program_that_does_not_fail_stays_as_it_was():
    failed = ValueError("once"), Program("EngineMachine", STEPS)
    with silence():
        assert trimmed(MACHINES["EngineMachine"], failed) is failed


def test_a_step_that_only_lets_a_pass_go_by_is_one():
    steps = [
        ("begin", {"ready": True, "sessions": 1, "turns": 0, "asks": 1, "thread_passes": 1}),
        *[("advance", {"seconds": 0.2})] * 10,
        ("flow", {"rounds": 6}),
        ("stop_reading", {"what": "abort", "which": 0}),
        ("stop_reading", {"what": "fail", "which": 0}),
        ("flow", {"rounds": 1}),
    ]
    with silence(), MUTANTS["F4"].active():
        failure = failure_of(MACHINES["EngineMachine"], steps)
        _, program = trimmed(MACHINES["EngineMachine"], (failure, Program("EngineMachine", steps)))
    assert "advance" not in [name for name, _ in program.steps]
    assert program.length <= 4


class Checks(Machine):
    """Two checks fail, each for some arguments of one rule."""

    @recorded(size=st.integers(0, 20), kind=st.sampled_from("abc"), is_on=st.booleans(), text=st.text(max_size=3))
    def check(self, size, kind, is_on, text):
        assert size < 3 or kind == "a", "one check"
        assert not is_on, "the other one"


def test_arguments_become_simple_and_the_check_stays_the_same():
    on = {"size": 1, "kind": "c", "is_on": True, "text": "xyz"}
    large = {"size": 17, "kind": "c", "is_on": True, "text": "xyz"}
    for first, others, expected in (
        (large, [on], {"size": 4, "kind": "b", "is_on": False, "text": ""}),
        (on, [large], {"size": 0, "kind": "a", "is_on": True, "text": ""}),
    ):
        steps = [("check", each) for each in (first, *others)]
        error, program = trimmed(Checks, (failure_of(Checks, steps), Program("Checks", steps)))
        assert program.steps == [("check", expected)]
        assert error.__traceback__ is not None
        assert str(error).startswith("one check" if first is large else "the other one")


class TwoWays(Machine):
    """In the first variant ten rules are a failure, in the second one is."""

    num_variants = 2

    def __init__(self):
        super().__init__()
        self.num_runs = 0

    @recorded(number=st.integers(0, 4))
    def a(self, number):
        self.num_runs += number == 0
        assert self.num_runs < (1 if self.variant else LONG + 2)


@pytest.mark.parametrize(("seed", "length"), [(3, 1), (0, LONG + 2)])
def test_a_long_program_is_replaced_by_a_shorter_one_if_there_is_one(seed, length):
    report = Fuzzer(TwoWays, PROFILES["quick"], seed).run(examples=1000)
    assert report.programs_to_find <= BATCH, "it was found with the first variant"
    assert isinstance(report.failure, AssertionError)
    assert report.program.length == length


class Once(Machine):
    """It fails in its first program only, after more rules than a short program has."""

    num_made = 0

    def __init__(self):
        super().__init__()
        Once.num_made += 1
        self.is_first = Once.num_made == 2  # after the one that is left out
        self.num_runs = 0

    @recorded()
    def a(self):
        self.num_runs += 1
        assert not self.is_first or self.num_runs < LONG + 2


def test_a_program_that_fails_once_is_not_shortened():
    Once.num_made = 0
    report = Fuzzer(Once, PROFILES["quick"], 0).run(examples=100)
    assert isinstance(report.failure, AssertionError)
    assert report.program.length == LONG + 2
    assert Once.num_made <= BATCH + 2


def test_an_error_while_a_shorter_program_is_looked_for_loses_nothing(monkeypatch):
    ran = Fuzzer._run_batch

    def fail_later(self, count):
        if self.report.seed != 3:
            raise Enough
        ran(self, count)

    monkeypatch.setattr(Fuzzer, "_run_batch", fail_later)
    report = Fuzzer(TwoWays, PROFILES["quick"], 3).run(examples=1000)
    assert isinstance(report.failure, AssertionError)
    assert report.program.length == LONG + 2
