"""Which rules a program is made of."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.errors import InvalidDefinition
from hypothesis.stateful import initialize, precondition

from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.runner import BATCH, PROFILES, Fuzzer

PROGRAMS = 200
MACHINES_SEEN = []


class Four(Machine):
    """`c` runs after an `a` only; three `a` with 7 are a failure."""

    fails = False

    def __init__(self):
        super().__init__()
        self.sevens = 0
        self.has_a = False
        MACHINES_SEEN.append(self)

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


class Stuck(Machine):
    @precondition(lambda self: not self.program.steps)
    @recorded()
    def once(self):
        pass


@pytest.fixture
def machines():
    MACHINES_SEEN.clear()
    Fuzzer(Four, PROFILES["quick"], 0).run(examples=PROGRAMS)
    yield [machine for machine in MACHINES_SEEN if machine.program.steps]
    MACHINES_SEEN.clear()


def names_of(machine):
    return [name for name, _ in machine.program.steps]


def test_hypothesis_asks_the_swarm(machines):
    """If this fails, programs choose their rules as hypothesis does: look into stateful.py for what draws them now."""
    assert len(machines) >= PROGRAMS
    for machine in machines:
        enabled = {rule.function.__name__ for rule in machine._rules_strategy._enabled}
        assert enabled, "it was asked for the rules"
        assert set(names_of(machine)) <= enabled | {"begin"} or not enabled & {"a", "b"}


def test_the_simplest_program_is_left_out_and_does_not_count():
    MACHINES_SEEN.clear()
    report = Fuzzer(Four, PROFILES["quick"], 0).run(examples=PROGRAMS)
    programs = [names_of(machine) for machine in MACHINES_SEEN]
    MACHINES_SEEN.clear()
    assert report.programs == sum(map(bool, programs)) == PROGRAMS
    assert programs.count([]) == PROGRAMS / BATCH  # hypothesis begins with it
    assert programs.count(["begin", *["b"] * PROFILES["quick"].steps]) < PROGRAMS / BATCH


class EmptyFails(Four):
    def _finish(self):
        assert self.program.steps, "nothing has run"


def test_a_program_that_is_left_out_has_no_findings():
    report = Fuzzer(EmptyFails, PROFILES["quick"], 0).run(examples=20)
    assert (report.failure, report.program, report.programs) == (None, None, 20)


def test_the_simple_rules_come_first():
    machine = Four()
    assert [rule.function.__name__ for rule in machine._rules_strategy.rules] == ["b", "never", "a", "c"]
    machine.teardown()


def test_programs_leave_out_rules_and_run_what_can_run(machines):
    used = set()
    for machine in machines:
        names = names_of(machine)
        assert names[0] == "begin" and names.count("begin") == 1
        assert "c" not in names or names.index("a") < names.index("c")
        if len(names) > 20:
            used.add("".join(sorted(set(names) - {"begin"})))
    assert used == {"a", "b", "ab", "ac", "abc"}  # c alone cannot run


def test_each_rule_is_as_likely_as_the_others(machines):
    of_both = [names for names in map(names_of, machines) if {"a", "b"} <= set(names)]
    steps = Counter(name for names in of_both for name in names)
    assert 0.9 < steps["a"] / steps["b"] < 1.1
    numbers = Counter(given["number"] for machine in machines for name, given in machine.program.steps if name == "a")
    assert set(numbers) == set(range(10))
    assert max(numbers.values()) < 1.5 * min(numbers.values())


def test_what_is_found_shrinks_to_what_it_takes():
    report = Fuzzer(Failing, PROFILES["quick"], 0).run(examples=PROGRAMS)
    assert report.failure is not None
    assert report.program.steps == [("a", {"number": 7})] * 3


def test_a_machine_that_cannot_go_on_is_said():
    with pytest.raises(InvalidDefinition, match=r"no rule of Stuck\(.*\) can run"):
        Fuzzer(Stuck, PROFILES["quick"], 0).run(examples=1)
