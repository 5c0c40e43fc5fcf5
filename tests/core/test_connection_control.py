"""SLEEP, WAKE and UPDATE_WEIGHTS: one at a time, while no session exists; sessions only while everything is awake."""

import pytest
from helpers.pair import STATISTICS, Pair, add_message, unchecked

from trioengine.core.config import WorkerConfig
from trioengine.core.connection import Connection, Role
from trioengine.core.errors import LocalProtocolError, RemoteProtocolError
from trioengine.core.messages import (
    AddSession,
    Configure,
    EndSession,
    Ready,
    SessionEnded,
    Sleep,
    Slept,
    Updated,
    UpdateWeights,
    Wake,
    Woken,
)
from trioengine.core.power import Tag

KV, WEIGHTS = Tag.KV_CACHE, Tag.WEIGHTS
CHANGES = [Sleep(), UpdateWeights("m", 2)]


def refused_by_both(pair, message, why):
    """We may not send it, and a peer that does breaks the rules."""
    with pytest.raises(LocalProtocolError, match=why):
        pair.engine.send(message)
    pair.worker.receive_data(unchecked(message))
    with pytest.raises(RemoteProtocolError, match=why):
        pair.worker.next_message()


def test_a_whole_night():
    pair = Pair()
    pair.down(AddSession(1), add_message(), EndSession(1))
    pair.up(SessionEnded(1, STATISTICS))
    pair.down(Sleep())
    pair.up(Slept())
    pair.down(Wake((KV,)))
    pair.up(Woken(None))
    pair.down(UpdateWeights("m", 2))
    pair.up(Updated(None))
    pair.down(Wake((WEIGHTS,)))
    pair.up(Woken(None))
    pair.down(AddSession(1), add_message(request=1))


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_no_change_finds_a_session(change):
    pair = Pair()
    pair.down(AddSession(1), EndSession(1))
    refused_by_both(pair, change, r"while sessions exist \(1\)")


@pytest.mark.parametrize("change", [*CHANGES, Wake((KV,))], ids=str)
def test_one_change_at_a_time(change):
    pair = Pair()
    pair.down(Sleep())
    refused_by_both(pair, change, "while SLEEP is unanswered")


def test_no_session_is_added_under_a_change():
    pair = Pair()
    pair.down(UpdateWeights("m", 2))
    refused_by_both(pair, AddSession(1), "while UPDATE_WEIGHTS is unanswered")


@pytest.mark.parametrize("woken", [(), (KV,), (WEIGHTS,)], ids=str)
def test_no_session_is_added_before_all_is_awake(woken):
    pair = Pair()
    pair.down(Sleep())
    pair.up(Slept())
    if woken:
        pair.down(Wake(woken))
        pair.up(Woken(None))
    refused_by_both(pair, AddSession(1), "sleeps")


def test_a_wake_that_failed_changes_nothing():
    pair = Pair()
    pair.down(Sleep())
    pair.up(Slept())
    pair.down(Wake((KV, WEIGHTS)))
    pair.up(Woken("no memory"))
    refused_by_both(pair, AddSession(1), "sleeps")


@pytest.mark.parametrize("tags", [(), (KV,), (KV, WEIGHTS)], ids=str)
def test_what_does_not_sleep_is_not_woken(tags):
    refused_by_both(Pair(), Wake(tags), "WAKE for tags that are awake")


@pytest.mark.parametrize("answer", [Slept(), Woken(None), Updated(None)], ids=str)
@pytest.mark.parametrize("change", [None, Sleep(), UpdateWeights("m", 2)], ids=str)
def test_an_answer_belongs_to_its_question(change, answer):
    pair = Pair()
    if change is not None:
        pair.down(change)
    if type(change).__name__[:5] == type(answer).__name__[:5] or (type(change), type(answer)) == (Sleep, Slept):
        pair.up(answer)
    else:
        with pytest.raises(LocalProtocolError, match="to answer"):
            pair.worker.send(answer)


def test_a_worker_that_starts_asleep():
    engine = Connection(Role.ENGINE)
    engine.send(Configure(WorkerConfig("m", asleep=(KV,))))
    engine.receive_data(unchecked(Ready("llama", "cpu", "float32", 100, 64, 8, 16, "torch")))
    assert engine.next_message() is not None
    with pytest.raises(LocalProtocolError, match="sleeps"):
        engine.send(AddSession(1))
    engine.send(Wake((KV,)))
