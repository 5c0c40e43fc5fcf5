"""What a worker is needed for, state by state."""

import pytest

from trioengine.core.lifecycle import Power
from trioengine.core.power import ALL_TAGS, Tag, desired_worker

NOTHING, CACHE = frozenset(), frozenset({Tag.KV_CACHE})


def needs(power, asleep=NOTHING, in_flight=0, is_finishing=False, is_changing=False):
    return desired_worker(power, asleep, in_flight=in_flight, is_finishing=is_finishing, is_changing=is_changing)


@pytest.mark.parametrize("power", [Power.LOADING, Power.AWAKE, Power.RESTARTING])
def test_awake_it_is_needed_for_everything(power):
    assert needs(power) == (True, NOTHING, True)
    assert needs(power).is_indispensable


@pytest.mark.parametrize("in_flight", [0, 3])
def test_before_a_sleep_it_is_needed_while_requests_finish(in_flight):
    found = needs(Power.FALLING_ASLEEP, in_flight=in_flight, is_finishing=True)
    assert found == (in_flight > 0, NOTHING, True)
    assert found.is_indispensable == (in_flight > 0)


@pytest.mark.parametrize("asleep", [NOTHING, CACHE])
@pytest.mark.parametrize("is_changing", [False, True])
def test_then_it_is_needed_asleep_or_not_at_all(asleep, is_changing):
    """One that retires costs nothing, whatever becomes of the one after it."""
    found = needs(Power.FALLING_ASLEEP, asleep, in_flight=2, is_changing=is_changing)
    assert found == (is_changing, ALL_TAGS, False)
    assert not found.is_indispensable


@pytest.mark.parametrize("is_changing", [False, True])
def test_asleep_it_is_needed_for_a_change_alone(is_changing):
    assert needs(Power.ASLEEP, CACHE, in_flight=2, is_changing=is_changing) == (is_changing, CACHE, False)


def test_what_wakes_comes_as_it_sleeps():
    assert needs(Power.WAKING, ALL_TAGS, in_flight=2) == (True, ALL_TAGS, False)
    assert not needs(Power.WAKING, ALL_TAGS).is_indispensable


@pytest.mark.parametrize("is_finishing", [False, True])
def test_for_an_update_it_is_needed_awake(is_finishing):
    assert needs(Power.UPDATING, is_finishing=is_finishing) == (True, NOTHING, is_finishing)
    assert needs(Power.UPDATING).is_indispensable


@pytest.mark.parametrize(
    ("asleep", "in_flight", "wanted"), [(NOTHING, 1, True), (NOTHING, 0, False), (CACHE, 1, False)]
)
def test_a_drain_needs_it_for_what_runs(asleep, in_flight, wanted):
    assert needs(Power.DRAINING, asleep, in_flight=in_flight) == (wanted, asleep, not asleep)


@pytest.mark.parametrize("asleep", [NOTHING, ALL_TAGS])
def test_closed_it_is_not_needed(asleep):
    assert needs(Power.CLOSED, asleep, in_flight=1, is_changing=True) == (False, asleep, False)
