"""The fuzzer by URL re-finds published bugs in servers that have them, and nothing in servers that do not."""

import pytest
import trio
from helpers.faulty_servers import (
    AbortByPrefix,
    AbortHitsAnother,
    AnotherConversation,
    CrashByAbort,
    FaultyServer,
    GarbageAfterWake,
    GaugeDrift,
    HeldForever,
    LeakAfterDisconnect,
    Sleeper,
    StaleCache,
    StateStuck,
    StuckAfterAborts,
)

from trioengine.testing.target.calibrate import calibrate, detect
from trioengine.testing.target.dialects import OPENAI
from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.exchange import Target
from trioengine.testing.target.hunt import Hunt

DEADLINE = 0.3  # seconds; the fakes answer in milliseconds


class Served:
    """A fake that can be replaced by a new one, at the same address for its clients."""

    def __init__(self, kind, nursery):
        self.kind, self.nursery = kind, nursery

    async def start(self, deadline):
        self.server = await self.nursery.start(self.kind().serve)
        self.driver = TrioDriver("127.0.0.1", self.server.port)
        target = Target(f"127.0.0.1:{self.server.port}", "", OPENAI)
        target.dialect = await self.driver.run(detect(target))
        self.target = await self.driver.run(calibrate(target))
        self.target.deadline = self.target.call_deadline = deadline
        return self

    async def fresh(self):
        """Replace the server, as a restart does."""
        server = await self.nursery.start(self.kind().serve)
        self.driver._address = ("127.0.0.1", server.port)


async def searched(kind, programs, deadline=DEADLINE):
    async with trio.open_nursery() as nursery:
        served = await Served(kind, nursery).start(deadline)
        hunt = Hunt(served.driver, served.target, seed=1, fresh=served.fresh, longest=6)
        for _ in range(programs):
            outcome = await hunt.search(programs=hunt.outcome.programs + 1)
            if outcome.found:
                break
        nursery.cancel_scope.cancel()
    return outcome


BUGS = {
    LeakAfterDisconnect: {"rest"},
    StuckAfterAborts: {"probe"},
    AbortHitsAnother: {"whole"},
    AbortByPrefix: {"whole"},
    AnotherConversation: {"golden", "marker"},
    StaleCache: {"cached"},
    GaugeDrift: {"rest"},
    CrashByAbort: {"probe"},
    GarbageAfterWake: {"golden"},
    HeldForever: {"whole"},
    StateStuck: {"state"},
}


@pytest.mark.parametrize("kind", BUGS, ids=lambda kind: kind.__name__)
async def test_a_published_bug_is_found_again(kind):
    outcome = await searched(kind, 200)
    (found,) = outcome.found
    assert found.finding.oracle in BUGS[kind], found.finding
    assert found.failed >= 4 and found.replays == 5
    assert len(found.steps) <= 5, found.steps


@pytest.mark.parametrize("kind", [FaultyServer, Sleeper])
async def test_a_server_without_a_bug_has_no_finding(kind):
    outcome = await searched(kind, 15, deadline=10.0)
    assert outcome.found == [] and outcome.programs == 15
