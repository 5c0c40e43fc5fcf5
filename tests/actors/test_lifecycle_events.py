"""The lifecycle events of an engine's observers, in their order."""

import pytest
from helpers.expectations import everything_is_given_back

from trioengine import EngineOverloaded, RequestRejected
from trioengine.actors.observer import Observer
from trioengine.core.config import EngineConfig
from trioengine.testing import simulated_engine

CONFIG = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0)


class Events(Observer):
    """All lifecycle events, as tuples."""

    def __init__(self):
        self.all = []

    def request_created(self, generation):
        self.all.append(("created",))

    def request_refused(self, request, error):
        self.all.append(("refused", type(error).__name__))

    def session_entering(self, session):
        self.all.append(("entering",))

    def session_opened(self, session):
        self.all.append(("opened", session.id))

    def session_moved(self, actor, phase, attachment, event):
        self.all.append(("moved", phase.value, event.value))

    def slot_taken(self, slot, id):
        self.all.append(("taken", slot.value, id))

    def slot_refused(self, slot, error):
        self.all.append(("no slot", slot.value, error.code))

    def line_joined(self, line):
        self.all.append(("joined",))

    def line_serving(self, line, task):
        self.all.append(("serving",))

    def line_served(self, line, task, *, is_admitted):
        self.all.append(("served", is_admitted))

    def power_moved(self, power, event):
        self.all.append(("power", power.value, event.value))

    def change_requested(self, change):
        self.all.append(("change", change.name))


@pytest.fixture
async def watched(autojump_clock):
    async with simulated_engine(CONFIG) as (engine, simulation):
        events = Events()
        engine.observers.append(events)
        yield engine, events
        await everything_is_given_back(engine, simulation)


async def test_a_request_from_its_creation_to_its_finish(autojump_clock, watched):
    engine, events = watched
    async with engine.open_session() as session:
        await session.ask("a", max_tokens=1)
    await session.ended()
    assert events.all == [
        ("entering",),
        ("taken", "session", 1),
        ("opened", 1),
        ("created",),
        ("taken", "request", 2),
        ("moved", "idle", "reserve"),
        ("moved", "preparing", "commit"),
        ("moved", "running", "finish"),
        ("moved", "idle", "end"),
        ("moved", "ended", "end"),  # of its task
        ("moved", "ended", "session_ended"),
    ]


async def test_a_request_is_refused_and_another_waits_in_line(autojump_clock, watched):
    engine, events = watched
    async with engine.open_session() as first, engine.open_session() as second:
        async with first.generate("a", max_tokens=40) as running:
            events.all.clear()
            with pytest.raises(EngineOverloaded):
                await second.ask("a", wait=False)
            assert events.all == [("created",), ("no slot", "request", "queue"), ("refused", "EngineOverloaded")]
            events.all.clear()
            running.abort()
            await second.ask("a", max_tokens=1)
            line = [event[:2] for event in events.all if event[0] in ("joined", "serving", "taken", "served")]
            assert line == [("joined",), ("serving",), ("taken", "request"), ("served", True)]


async def test_a_refused_prompt_and_a_sleep(autojump_clock, watched):
    engine, events = watched
    async with engine.open_session() as session:
        with pytest.raises(RequestRejected):
            await session.ask("")
        assert ("refused", "RequestRejected") in events.all
    await session.ended()
    events.all.clear()
    await engine.sleep()
    await engine.wake()
    changes = [event for event in events.all if event[0] in ("change", "power")]
    assert changes[0] == ("change", "sleep at level 1 (abort)")
    assert changes[1] == ("power", "awake", "sleep") and changes[-1][0] == "power"
