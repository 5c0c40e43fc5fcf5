"""The worker that the engine wants, stage by stage."""

import pytest

from trioengine.core.lifecycle import PowerStage
from trioengine.core.power import ALL_TAGS, Tag, desired_worker

NOTHING, CACHE = frozenset(), frozenset({Tag.KV_CACHE})


def needs(stage, asleep=NOTHING, in_flight=0):
    return desired_worker(stage, asleep, in_flight=in_flight)


@pytest.mark.parametrize("stage", [PowerStage.LOADING, PowerStage.AWAKE, PowerStage.RESTARTING])
def test_awake_it_is_needed_for_everything(stage):
    assert needs(stage) == (True, NOTHING, True)
    assert needs(stage).is_indispensable


@pytest.mark.parametrize("in_flight", [0, 3])
def test_before_a_sleep_it_is_needed_while_requests_finish(in_flight):
    found = needs(PowerStage.FINISHING_TO_SLEEP, in_flight=in_flight)
    assert found == (in_flight > 0, NOTHING, True)
    assert found.is_indispensable == (in_flight > 0)


@pytest.mark.parametrize("asleep", [NOTHING, CACHE])
@pytest.mark.parametrize("stage", [PowerStage.FALLING_ASLEEP, PowerStage.RETIRING])
def test_then_it_is_needed_asleep_or_not_at_all(asleep, stage):
    """One that retires costs nothing, whatever becomes of the one after it."""
    found = needs(stage, asleep, in_flight=2)
    assert found == (stage is PowerStage.RETIRING, ALL_TAGS, False)
    assert not found.is_indispensable


@pytest.mark.parametrize("stage", [PowerStage.ASLEEP, PowerStage.UPDATING_ASLEEP])
def test_asleep_it_is_needed_for_an_update_alone(stage):
    assert needs(stage, CACHE, in_flight=2) == (stage is PowerStage.UPDATING_ASLEEP, CACHE, False)


def test_what_wakes_comes_as_it_sleeps():
    assert needs(PowerStage.WAKING, ALL_TAGS, in_flight=2) == (True, ALL_TAGS, False)
    assert not needs(PowerStage.WAKING, ALL_TAGS).is_indispensable


@pytest.mark.parametrize("stage", [PowerStage.FINISHING_TO_UPDATE, PowerStage.UPDATING])
def test_for_an_update_it_is_needed_awake(stage):
    assert needs(stage) == (True, NOTHING, stage is PowerStage.FINISHING_TO_UPDATE)
    assert needs(stage).is_indispensable


@pytest.mark.parametrize(
    ("asleep", "in_flight", "wanted"), [(NOTHING, 1, True), (NOTHING, 0, False), (CACHE, 1, False)]
)
def test_a_drain_needs_it_for_what_runs(asleep, in_flight, wanted):
    assert needs(PowerStage.DRAINING, asleep, in_flight=in_flight) == (wanted, asleep, not asleep)


@pytest.mark.parametrize("asleep", [NOTHING, ALL_TAGS])
def test_closed_it_is_not_needed(asleep):
    assert needs(PowerStage.CLOSED, asleep, in_flight=1) == (False, asleep, False)
