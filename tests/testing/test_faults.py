"""Injected faults as periods: what they excuse, and in which lives."""

import pytest

from trioengine.core.types import Cause
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life


@pytest.fixture
def faults():
    return InjectedFaults()


def test_a_fault_excuses_the_lives_that_it_overlaps(faults):
    before, across = Life(faults), Life(faults)
    before.end()
    faults.begin(Harm.WORKERS)
    within = Life(faults)
    within.end()
    faults.end(Harm.WORKERS)
    after = Life(faults)
    assert [faults.hit(life, Harm.WORKERS) for life in (before, across, within, after)] == [False, True, True, False]
    faults.begin(Harm.WORKERS)
    assert faults.hit(after, Harm.WORKERS), "it lives on"


def test_a_strike_has_no_length(faults):
    before = Life(faults)
    faults.strike(Harm.ABORT_ALL)
    after = Life(faults)
    assert faults.causes(before) == {Cause.ABORT_ALL} and faults.causes(after) == set()
    assert not faults.lasts(Harm.ABORT_ALL)


def test_a_fault_that_lasts_is_not_begun_twice(faults):
    faults.begin(Harm.SLEEP)
    life = Life(faults)
    faults.begin(Harm.SLEEP)
    faults.strike(Harm.SLEEP)
    faults.end(Harm.SLEEP)
    assert faults.hit(life, Harm.SLEEP) and not faults.hit(Life(faults), Harm.SLEEP)


@pytest.mark.parametrize(
    ("code", "harm"),
    [
        ("worker_lost", Harm.WORKERS),
        ("shutdown", Harm.CLOSING),
        ("shutting_down", Harm.WORKERS),
        ("aborted", Harm.OPERATORS),
        ("asleep", Harm.SLEEP),
        ("sleep", Harm.SLEEP),
        ("abort_all", Harm.ABORT_ALL),
    ],
)
def test_a_code_is_excused_by_its_fault_alone(faults, code, harm):
    life = Life(faults)
    for other in Harm:
        if other is not harm and not {other, harm} <= {Harm.CLOSING, Harm.WORKERS}:
            faults.begin(other)
    if harm not in (Harm.CLOSING, Harm.WORKERS):
        assert not faults.excuse(code, life)
    faults.begin(harm)
    assert faults.excuse(code, life) and faults.excuse("overloaded", Life(InjectedFaults()))


def test_unknown_codes_are_not_excused(faults):
    assert not faults.excuse("internal_error", Life(faults))
