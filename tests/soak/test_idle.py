"""Many sessions that do nothing cost little."""

import json

import trio
from leaving import Soak
from trio_websocket import open_websocket_url

IDLE = 1000
MOST_EACH = 100e3  # bytes of RSS


async def stay(url, *, task_status):
    """A client that has been told of its session, and says nothing."""
    async with open_websocket_url(url) as websocket:
        assert json.loads(await websocket.get_message())["type"] == "session.created"
        task_status.started()
        await trio.sleep_forever()


async def growth(served):
    """Bytes that the server has grown by with so many of them; others are answered meanwhile."""
    before = served.rss
    async with trio.open_nursery() as nursery:
        for _ in range(IDLE):
            await nursery.start(stay, f"ws://localhost:{served.port}/v1/realtime")
        grown = served.rss - before
        await Soak(served.port, "m").run(8, 8, lambda count: None)
        assert served.get("/debug/invariants")["ok"]
        nursery.cancel_scope.cancel()
    return grown


def test_idle_sessions_are_small(served, descriptors):
    descriptors(IDLE + 200)
    before = served.get("/debug/invariants")["tasks"], served.descriptors
    trio.run(Soak(served.port, "m", seed=1).run, 16, 8, lambda count: None)  # the first ones are larger
    assert trio.run(growth, served) < IDLE * MOST_EACH
    served.rest(*before)
