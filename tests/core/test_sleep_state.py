"""SleepState as a value: each method, and a comparison with the flags that it replaces, whatever is done."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from trioengine.core.errors import TransitionFailed
from trioengine.core.power import ALL_TAGS, SleepState, Tag, WeightsState, sorted_tags

AWAKE, KEPT, DISCARDED, AWAITING_UPDATE = WeightsState
KV, WEIGHTS = frozenset({Tag.KV_CACHE}), frozenset({Tag.WEIGHTS})
NOTHING = frozenset()
LEVELS = [1, 2]


def shown(value):
    """Name a parameter alike in every process: a set's own order depends on the process."""
    return "+".join(sorted_tags(value)) or "nothing" if isinstance(value, frozenset) else str(value)


def asleep(weights, level, is_cache_awake=False):
    return SleepState(weights, is_cache_awake, level)


def test_it_begins_awake():
    sleep_state = SleepState()
    assert (sleep_state.weights, sleep_state.is_cache_awake, sleep_state.fell_asleep_at) == (AWAKE, True, 0)
    assert (sleep_state.asleep, sleep_state.level) == (NOTHING, None)


@pytest.mark.parametrize("is_cache_awake", [True, False])
@pytest.mark.parametrize("weights", WeightsState)
def test_what_sleeps(weights, is_cache_awake):
    sleep_state = asleep(weights, 2, is_cache_awake)
    assert sleep_state.asleep == (NOTHING if weights is AWAKE else WEIGHTS) | (NOTHING if is_cache_awake else KV)
    assert sleep_state.level == (2 if sleep_state.asleep else None)


@pytest.mark.parametrize("weights", [KEPT, DISCARDED, AWAITING_UPDATE])
@pytest.mark.parametrize("is_cache_awake", [True, False])
def test_weights_that_sleep_deeper_are_not_kept(weights, is_cache_awake):
    with pytest.raises(TransitionFailed, match=r"it sleeps at level 2: the weights are discarded; wake it first$"):
        asleep(weights, 2, is_cache_awake).check_sleep(1)


@pytest.mark.parametrize(
    ("sleep_state", "level"),
    [
        (SleepState(), 1),
        (SleepState(fell_asleep_at=2), 1),  # it woke
        (asleep(AWAKE, 2), 1),  # the weights woke
        (asleep(KEPT, 1), 1),
        (asleep(KEPT, 1), 2),
        (asleep(DISCARDED, 2), 2),
    ],
    ids=shown,
)
def test_levels_that_can_be_had(sleep_state, level):
    sleep_state.check_sleep(level)


def test_a_sleep_has_nothing_to_do_where_all_sleeps_at_its_level():
    assert [asleep(KEPT, 1).sleeps_at(level) for level in LEVELS] == [True, False]
    assert [asleep(KEPT, 2).sleeps_at(level) for level in LEVELS] == [False, True]
    assert not asleep(KEPT, 2, is_cache_awake=True).sleeps_at(2)
    assert not asleep(AWAKE, 2).sleeps_at(2)
    assert not SleepState(fell_asleep_at=2).sleeps_at(2)


@pytest.mark.parametrize(("level", "weights"), [(1, KEPT), (2, DISCARDED)])
@pytest.mark.parametrize("before", [SleepState(), asleep(AWAKE, 2), asleep(KEPT, 1, is_cache_awake=True)], ids=shown)
def test_a_sleep_keeps_or_discards_the_weights(before, level, weights):
    assert before.slept(level) == asleep(weights, level)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (asleep(KEPT, 1), asleep(DISCARDED, 2)),
        (asleep(DISCARDED, 2), asleep(DISCARDED, 2)),
        (asleep(AWAITING_UPDATE, 2), asleep(DISCARDED, 2)),
        (asleep(KEPT, 2), asleep(KEPT, 2)),  # updated: there is nothing to discard
        (asleep(AWAITING_UPDATE, 2, is_cache_awake=True), asleep(DISCARDED, 2)),
        (asleep(KEPT, 2, is_cache_awake=True), asleep(DISCARDED, 2)),
    ],
    ids=shown,
)
def test_a_sleep_at_level_2_of_what_sleeps(before, after):
    assert before.slept(2) == after


@pytest.mark.parametrize("tags", [NOTHING, KV, WEIGHTS, ALL_TAGS], ids=shown)
@pytest.mark.parametrize(
    ("sleep_state", "reload", "wakes"),
    [
        (SleepState(), True, NOTHING),
        (asleep(AWAKE, 2), False, KV),
        (asleep(KEPT, 1, is_cache_awake=True), True, WEIGHTS),
        (asleep(KEPT, 1), True, ALL_TAGS),
        (asleep(KEPT, 2), False, ALL_TAGS),
        (asleep(DISCARDED, 2), True, ALL_TAGS),
        (asleep(DISCARDED, 2), False, KV),
        (asleep(DISCARDED, 2, is_cache_awake=True), False, NOTHING),
        (asleep(AWAITING_UPDATE, 2), True, ALL_TAGS),
        (asleep(AWAITING_UPDATE, 2), False, KV),
    ],
    ids=shown,
)
def test_what_a_wake_brings_back(sleep_state, reload, wakes, tags):
    assert sleep_state.to_wake(tags, reload=reload) == tags & wakes


@pytest.mark.parametrize(
    ("before", "tags", "after"),
    [
        (SleepState(), ALL_TAGS, SleepState()),
        (asleep(KEPT, 1), NOTHING, asleep(KEPT, 1)),
        (asleep(KEPT, 1), ALL_TAGS, SleepState(fell_asleep_at=1)),
        (asleep(KEPT, 1), KV, asleep(KEPT, 1, is_cache_awake=True)),
        (asleep(KEPT, 1), WEIGHTS, asleep(AWAKE, 1)),
        (asleep(DISCARDED, 2), WEIGHTS, asleep(AWAKE, 2)),
        (asleep(DISCARDED, 2), KV, asleep(DISCARDED, 2, is_cache_awake=True)),
        (asleep(AWAITING_UPDATE, 2), KV, asleep(AWAITING_UPDATE, 2, is_cache_awake=True)),
        (asleep(AWAITING_UPDATE, 2, is_cache_awake=True), WEIGHTS, SleepState(fell_asleep_at=2)),
    ],
    ids=shown,
)
def test_what_is_back(before, tags, after):
    assert before.woken(tags) == after


@pytest.mark.parametrize("is_cache_awake", [True, False])
@pytest.mark.parametrize(
    ("before", "after"),
    [(AWAKE, AWAKE), (KEPT, KEPT), (DISCARDED, AWAITING_UPDATE), (AWAITING_UPDATE, AWAITING_UPDATE)],
)
def test_only_what_is_discarded_awaits_an_update(before, after, is_cache_awake):
    assert asleep(before, 2, is_cache_awake).awaiting_update() == asleep(after, 2, is_cache_awake)


@pytest.mark.parametrize("is_cache_awake", [True, False])
@pytest.mark.parametrize(
    ("before", "after"), [(AWAKE, AWAKE), (KEPT, KEPT), (DISCARDED, KEPT), (AWAITING_UPDATE, KEPT)]
)
def test_an_update_leaves_weights_that_any_wake_brings_back(before, after, is_cache_awake):
    assert asleep(before, 2, is_cache_awake).updated() == asleep(after, 2, is_cache_awake)


class Flags(RuleBasedStateMachine):
    """Four flags, kept one by one, and the tags sent to a worker; a change that fails leaves them unchanged."""

    def __init__(self):
        super().__init__()
        self.sleep_state = SleepState()
        self.asleep, self.level = NOTHING, 0
        self.discarded = self.awaits_update = False

    @invariant()
    def is_the_same(self):
        sleep_state = self.sleep_state
        assert sleep_state.asleep == self.asleep
        assert sleep_state.level == (self.level if self.asleep else None)
        assert (sleep_state.weights in (DISCARDED, AWAITING_UPDATE)) is self.discarded
        assert (sleep_state.weights is AWAITING_UPDATE) is self.awaits_update

    @rule(level=st.sampled_from(LEVELS))
    def sleep(self, level):
        if self.asleep and level < self.level and Tag.WEIGHTS in self.asleep:
            with pytest.raises(TransitionFailed, match=f"level {self.level}"):
                self.sleep_state.check_sleep(level)
            return
        self.sleep_state.check_sleep(level)
        has_nothing_to_do = self.asleep == ALL_TAGS and level == self.level
        assert self.sleep_state.sleeps_at(level) is has_nothing_to_do
        self.sleep_state = self.sleep_state.slept(level)
        self.awaits_update = False
        if not has_nothing_to_do:
            self.asleep, self.level, self.discarded = ALL_TAGS, level, level == 2

    @rule(tags=st.sampled_from([KV, WEIGHTS, ALL_TAGS]), reload=st.booleans(), fails=st.booleans())
    def wake(self, tags, reload, fails):
        wanted = tags & self.asleep
        waits = self.discarded and not reload and Tag.WEIGHTS in wanted
        if waits:
            wanted -= WEIGHTS
        assert self.sleep_state.to_wake(tags, reload=reload) == wanted
        if wanted and fails:
            return
        self.take_back(wanted)
        if Tag.WEIGHTS in tags - wanted:
            self.sleep_state = self.sleep_state.awaiting_update()
        self.awaits_update |= waits

    @rule(fails_to_wake=st.booleans())
    def update(self, fails_to_wake):
        awaits_update = self.sleep_state.weights is AWAITING_UPDATE
        self.sleep_state = self.sleep_state.updated()
        self.discarded = self.awaits_update = False
        if awaits_update and not fails_to_wake:
            self.take_back(WEIGHTS)

    def take_back(self, tags):
        self.sleep_state = self.sleep_state.woken(tags)
        self.asleep -= tags
        if Tag.WEIGHTS in tags:
            self.discarded = self.awaits_update = False


def test_it_says_what_four_flags_say():
    run_state_machine_as_test(Flags)


def test_tags_are_said_in_the_order_of_their_names():
    assert sorted_tags(ALL_TAGS) == (Tag.KV_CACHE, Tag.WEIGHTS)
    assert sorted_tags([]) == ()
