"""Which rules a program is made of."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition

from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.runner import PROFILES, Fuzzer

PROGRAMS = 200
PROGRAMS_SEEN = []


class Four(Machine):
    """`c` runs after an `a` only; three `a` with 7 are a failure."""

    fails = False

    def __init__(self):
        super().__init__()
        self.sevens = 0
        self.has_a = False
        PROGRAMS_SEEN.append(self.program)

    @recorded(initialize, start=st.integers(0, 3))
    def begin(self, start):
        self.start = start

    @recorded(number=st.integers(0, 9))
    def a(self, number):
        self.has_a = True
        self.sevens += number == 7
        assert not self.fails or self.sevens < 3

    @recorded()
    def b(self):
        assert self.start in range(4), "it has begun"

    @precondition(lambda self: self.has_a)
    @recorded(flag=st.booleans())
    def c(self, flag):
        assert self.has_a

    @precondition(lambda self: False)
    @recorded()
    def never(self):
        raise AssertionError("its precondition does not hold")


class Failing(Four):
    fails = True


@pytest.fixture
def programs():
    PROGRAMS_SEEN.clear()
    yield PROGRAMS_SEEN
    PROGRAMS_SEEN.clear()


def test_hypothesis_asks_where_it_used_to():
    """If this fails, programs choose their rules as hypothesis does: look into stateful.py for what draws them now."""
    machine = RuleBasedStateMachine.__new__(Four)
    RuleBasedStateMachine.__init__(machine)
    assert [rule.function.__name__ for rule in machine._rules_strategy.rules] == ["b", "never", "a", "c"]


def test_programs_leave_out_rules_and_run_what_can_run(programs):
    report = Fuzzer(Four, PROFILES["quick"], 0).run(examples=PROGRAMS)
    assert report.failure is None and report.programs >= PROGRAMS
    used = Counter()
    for program in programs:
        names = [name for name, _ in program.steps]
        assert names[0] == "begin" and names.count("begin") == 1
        assert "c" not in names or names.index("a") < names.index("c")
        used[frozenset(names) - {"begin"}] += len(names) > 20
    assert {frozenset("a"), frozenset("b"), frozenset("ab"), frozenset("ac"), frozenset("abc")} <= set(used)
    assert max(used.values()) < PROGRAMS * 0.9, "some programs leave out what others run"


def test_each_rule_is_as_likely_as_the_others(programs):
    Fuzzer(Four, PROFILES["quick"], 0).run(examples=PROGRAMS)
    steps = Counter(name for program in programs for name, _ in program.steps)
    assert 0.8 < steps["a"] / steps["b"] < 1.25
    numbers = Counter(given["number"] for program in programs for name, given in program.steps if name == "a")
    assert set(numbers) == set(range(10))
    assert max(numbers.values()) < 2 * min(numbers.values())


def test_what_is_found_shrinks_to_what_it_takes():
    report = Fuzzer(Failing, PROFILES["quick"], 0).run(examples=PROGRAMS)
    assert report.failure is not None
    assert report.program.steps == [("a", {"number": 7})] * 3
