"""A real server, a real model, and clients that leave at random: afterwards nothing of them is left."""

import trio
from leaving import Soak

CONNECTIONS = 32
WAYS = 18  # in which clients leave; 100 sessions take each of them
MOST_GROWTH = 10e6  # bytes of RSS, from the 200th session to the last


def test_clients_that_leave_leave_nothing_behind(served, request):
    sessions = request.config.getoption("--sessions")
    soak = Soak(served.port, "m")
    rss = {}

    def after(count):
        if count == 200 or count == sessions:
            rss[count] = served.rss

    before = served.get("/debug/invariants")["tasks"], served.descriptors
    trio.run(soak.run, sessions, CONNECTIONS, after)
    statistics = served.rest(*before)
    assert statistics["kv_blocks_free"] + statistics["kv_blocks_cached"] == statistics["kv_blocks_total"]
    ended = statistics["finished"] + statistics["aborted"] + statistics["failed"]
    assert statistics["received"] == ended > 0
    assert statistics["preparing"] == statistics["waiting"] == statistics["running"] == 0
    assert rss[sessions] - rss.get(200, rss[sessions]) < MOST_GROWTH
    assert served.stop() == 0
    log = served.log.read_text()
    assert "Traceback" not in log and "ERROR" not in log, log[-4000:]
    assert len(soak.seen) == WAYS, soak.seen
