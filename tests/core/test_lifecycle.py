"""The tables: every pair of state and event is there, is ignored, or raises; the last two change nothing."""

import itertools

import pytest

from trioengine.core.errors import LocalProtocolError
from trioengine.core.lifecycle import (
    POWER_IGNORES,
    POWER_TRANSITIONS,
    SESSION_IGNORES,
    SESSION_TRANSITIONS,
    Action,
    Attachment,
    Event,
    Phase,
    Power,
    PowerEvent,
    PowerStage,
    SessionLifecycle,
    next_stage,
)

STATES = list(itertools.product(Phase, Attachment))
SETTLES = {Action.SETTLE_AS_REPORTED, Action.SETTLE_ABORTED, Action.SETTLE_REFUSED, Action.SETTLE_LOST}
WITH_REQUEST = {Phase.PREPARING, Phase.RUNNING, Phase.STOPPING, Phase.SUSPENDED, Phase.ENDING}


def reachable() -> set[tuple[Phase, Attachment]]:
    seen, todo = set(), [(Phase.IDLE, Attachment.DETACHED)]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            for (phase, attachment, _), transition in SESSION_TRANSITIONS.items():
                if (phase, attachment) == state:
                    todo.append((transition.phase, transition.attachment))
    return seen


@pytest.mark.parametrize(("phase", "attachment"), STATES)
@pytest.mark.parametrize("event", Event)
def test_every_pair_is_in_the_table_or_changes_nothing(phase, attachment, event):
    lifecycle = SessionLifecycle()
    lifecycle.phase, lifecycle.attachment = phase, attachment
    transition = SESSION_TRANSITIONS.get((phase, attachment, event))
    if transition is None and phase in SESSION_IGNORES.get(event, ()):
        assert lifecycle.apply(event) == ()
        assert (lifecycle.phase, lifecycle.attachment) == (phase, attachment)
    elif transition is None:
        with pytest.raises(LocalProtocolError, match=event.value):
            lifecycle.apply(event)
        assert (lifecycle.phase, lifecycle.attachment) == (phase, attachment)
    else:
        assert lifecycle.apply(event) == transition.actions
        assert (lifecycle.phase, lifecycle.attachment) == (transition.phase, transition.attachment)


def test_the_table_holds_the_reachable_states_and_no_others():
    """Nothing leads out of the last one."""
    last = (Phase.ENDED, Attachment.DETACHED)
    assert {(phase, attachment) for phase, attachment, _ in SESSION_TRANSITIONS} == reachable() - {last}


@pytest.mark.parametrize("key", SESSION_TRANSITIONS, ids=str)
def test_every_row_changes_or_does_something(key):
    after = SESSION_TRANSITIONS[key]
    assert after.actions or (after.phase, after.attachment) != key[:2]


@pytest.mark.parametrize("event", SESSION_IGNORES)
def test_ignored_events_have_nothing_left_to_do(event):
    """Ignored in a reachable state: the request is aborted, or the session has ended, detached or lost its worker."""
    for phase, attachment in reachable():
        if (phase, attachment, event) in SESSION_TRANSITIONS or phase not in SESSION_IGNORES[event]:
            continue
        match event:
            case Event.ABORT:
                assert phase not in (Phase.PREPARING, Phase.RUNNING, Phase.SUSPENDED)
            case Event.END:
                assert phase in (Phase.ENDING, Phase.ENDED)
            case Event.WORKER_LOST:
                assert attachment is Attachment.DETACHED


@pytest.mark.parametrize("state", sorted(reachable(), key=str))
@pytest.mark.parametrize("event", [Event.END, Event.ABORT])
def test_end_and_abort_are_legal_everywhere(state, event):
    assert (*state, event) in SESSION_TRANSITIONS or state[0] in SESSION_IGNORES[event]


@pytest.mark.parametrize("key", SESSION_TRANSITIONS, ids=str)
def test_a_request_is_settled_exactly_where_it_goes(key):
    """A SETTLE on every way out of a state with a request, and nowhere else."""
    before, after = key[0], SESSION_TRANSITIONS[key]
    settles = sum(action in SETTLES for action in after.actions)
    assert settles == (1 if before in WITH_REQUEST and after.phase not in WITH_REQUEST else 0)


@pytest.mark.parametrize("key", SESSION_TRANSITIONS, ids=str)
def test_attaching_posts_add_session_and_only_the_worker_detaches(key):
    _, before, event = key
    after = SESSION_TRANSITIONS[key]
    attaches = (before, after.attachment) == (Attachment.DETACHED, Attachment.ATTACHED)
    assert attaches == (Action.POST_ADD_SESSION in after.actions)
    match before, after.attachment:
        case (Attachment.ATTACHED, Attachment.DETACHED):
            assert event is Event.WORKER_LOST
        case (Attachment.DETACHING, Attachment.DETACHED):
            assert event in (Event.SESSION_ENDED, Event.WORKER_LOST)
        case _:
            assert (before, after.attachment) != (Attachment.DETACHING, Attachment.ATTACHED)
            assert (before, after.attachment) != (Attachment.DETACHED, Attachment.DETACHING)


@pytest.mark.parametrize("key", SESSION_TRANSITIONS, ids=str)
def test_detaching_posts_end_session_once(key):
    before, attachment, event = key
    after = SESSION_TRANSITIONS[key]
    over = {Phase.ENDING, Phase.ENDED}
    detaches = (attachment, after.attachment) == (Attachment.ATTACHED, Attachment.DETACHING)
    assert (Action.POST_END_SESSION in after.actions) == detaches
    assert (event in (Event.END, Event.DETACH) and attachment is Attachment.ATTACHED) == detaches
    assert (before in over) <= (after.phase in over)


@pytest.mark.parametrize("key", SESSION_TRANSITIONS, ids=str)
def test_only_a_suspended_request_outlives_its_attachment(key):
    before, attachment, event = key
    after = SESSION_TRANSITIONS[key]
    is_lost = event in (Event.WORKER_LOST, Event.SESSION_ENDED) and attachment is not Attachment.DETACHED
    if is_lost and before in (Phase.RUNNING, Phase.SUSPENDED):
        assert after.phase is Phase.SUSPENDED
    assert (event in (Event.RESUME, Event.GIVE_UP)) <= (before is Phase.SUSPENDED)


@pytest.mark.parametrize("key", SESSION_TRANSITIONS, ids=str)
def test_the_session_slot_is_freed_once_when_ended_and_detached(key):
    before, attachment, _ = key
    after = SESSION_TRANSITIONS[key]
    gone = (Phase.ENDED, Attachment.DETACHED)
    assert (Action.FREE_SESSION in after.actions) == (
        (after.phase, after.attachment) == gone and (before, attachment) != gone
    )


def test_a_session_is_open_on_the_worker_until_end_session_is_posted():
    lifecycle = SessionLifecycle()
    for attachment, expected in [
        (Attachment.DETACHED, (False, False, False)),
        (Attachment.ATTACHED, (True, True, False)),
        (Attachment.DETACHING, (True, False, True)),
    ]:
        lifecycle.attachment = attachment
        assert (lifecycle.is_attached, lifecycle.is_open_on_worker, lifecycle.is_detaching) == expected


def test_a_finish_that_crosses_a_stop_settles_as_reported():
    lifecycle = SessionLifecycle()
    for event in (Event.RESERVE, Event.COMMIT, Event.ABORT):
        lifecycle.apply(event)
    assert lifecycle.apply(Event.FINISH) == (Action.SETTLE_AS_REPORTED,)
    assert repr(lifecycle) == "<SessionLifecycle idle attached>"


@pytest.mark.parametrize("stage", PowerStage)
@pytest.mark.parametrize("event", PowerEvent)
def test_power(stage, event):
    following = POWER_TRANSITIONS[stage].get(event)
    if following is None and stage in POWER_IGNORES[event]:
        assert next_stage(stage, event) is stage
    elif following is None:
        with pytest.raises(LocalProtocolError, match=event.value):
            next_stage(stage, event)
    else:
        assert next_stage(stage, event) is following
    assert next_stage(stage, PowerEvent.CLOSE) is PowerStage.CLOSED


@pytest.mark.parametrize("stage", PowerStage)
def test_a_drain_and_the_death_of_the_worker_are_legal_in_every_stage(stage):
    for event in (PowerEvent.DRAIN, PowerEvent.CLOSE, PowerEvent.WORKER_LOST):
        assert event in POWER_TRANSITIONS[stage] or stage in POWER_IGNORES[event]


@pytest.mark.parametrize("event", PowerEvent)
def test_an_engine_that_ends_ignores_all_but_its_close(event):
    assert next_stage(PowerStage.CLOSED, event) is PowerStage.CLOSED
    after = PowerStage.CLOSED if event is PowerEvent.CLOSE else PowerStage.DRAINING
    assert next_stage(PowerStage.DRAINING, event) is after


def test_while_the_engine_changes_the_events_of_its_worker_are_ignored():
    """Where users see it sleep, wake, fall asleep or get other weights."""
    changing = (Power.FALLING_ASLEEP, Power.ASLEEP, Power.WAKING, Power.UPDATING)
    for stage in PowerStage:
        if stage.power in changing:
            assert next_stage(stage, PowerEvent.READY) is next_stage(stage, PowerEvent.WORKER_LOST) is stage


def test_every_row_of_the_power_table_changes_the_stage():
    assert all(after is not stage for stage, row in POWER_TRANSITIONS.items() for after in row.values())


def test_users_see_every_power_and_each_stage_as_one():
    assert {stage.power for stage in PowerStage} == set(Power)
    assert {stage.value for stage in PowerStage} >= {power.value for power in Power}
    assert PowerStage.FINISHING_TO_SLEEP.power is PowerStage.RETIRING.power is Power.FALLING_ASLEEP
    assert PowerStage.UPDATING_ASLEEP.power is Power.ASLEEP
    assert PowerStage.FINISHING_TO_UPDATE.power is Power.UPDATING


def test_admitted_requests_go_to_the_worker_while_others_may_finish():
    running = {stage for stage in PowerStage if stage.runs_requests}
    finishing = {stage for stage, row in POWER_TRANSITIONS.items() if PowerEvent.QUIESCE in row}
    assert running == {PowerStage.AWAKE, PowerStage.DRAINING} | finishing
