"""Realtime sessions that are not resumed: other keys, bad parameters, and limits."""

import pytest
import trio
from helpers.buffered_bytes import KEYS, bearer
from helpers.clients import HOST, Client, open_clients
from helpers.resuming import HEADERS, SHORT, connection, cut, is_over, refused, resumable, resumed
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked

from trioengine.serve.realtime.endpoint import NOT_RESUMED
from trioengine.serve.realtime.window import MAX_KEPT


async def test_only_its_key_resumes_a_session(autojump_clock):
    async with open_clients(api_key=KEYS) as clients:
        client = await cut(clients, response=None, **bearer(KEYS[0]))
        query = f"session={client.token}&last_seq=2"
        other = await refused(clients, query, authorization=f"Bearer {KEYS[1]}")
        unknown = await refused(clients, f"session={'0' * 48}&last_seq=2", authorization=f"Bearer {KEYS[0]}")
        assert other == unknown == (404, "session_not_found", "session")
        assert (await refused(clients, query))[:2] == (401, "invalid_api_key")
        async with resumed(clients, client, **bearer(KEYS[0])):
            assert (await client.ask("again", **SHORT))["status"] == "incomplete"
            await client.websocket.aclose()


async def test_a_session_counts_for_its_key_as_long_as_it_waits(autojump_clock):
    """A client can come back even if the key has no more sessions; a new one cannot begin."""
    async with open_clients(api_key=KEYS, max_sessions_per_key=1) as clients:
        client = await cut(clients, response=None, **bearer())
        key = {"authorization": f"Bearer {KEYS[0]}"}
        for _ in range(2):
            assert (await refused(clients, "", **key))[:2] == (429, "too_many_sessions")
            async with resumed(clients, client, **bearer()):
                assert (await refused(clients, "", **key))[:2] == (429, "too_many_sessions")
        async with resumed(clients, client, **bearer()):
            await client.websocket.aclose()
        await wait_all_tasks_blocked()
        async with clients.realtime(**bearer()):
            pass


async def test_there_are_at_most_as_many_sessions_as_connections(autojump_clock):
    async with open_clients(max_connections=2) as clients:
        lost = [await cut(clients, seconds=10, response=None) for _ in range(2)]
        assert (await refused(clients, "resume=10"))[:2] == (503, "too_many_sessions")
        async with clients.realtime():
            pass
        await trio.sleep(11)
        for client in lost:
            assert await is_over(clients, client)


BAD = [
    ("resume=0", (400, "invalid_value", "resume")),
    ("resume=61", (400, "invalid_value", "resume")),
    ("resume=nan", (400, "invalid_value", "resume")),
    ("resume=", (400, "invalid_value", "resume")),
    ("resume=5&resume=5", (400, "invalid_value", "resume")),
    ("last_seq=1", (400, "invalid_value", "last_seq")),
    ("session=x&resume=5&last_seq=1", (400, "invalid_value", "resume")),
    ("session=x", (400, "missing_parameter", "last_seq")),
    ("session=x&last_seq=1", (404, "session_not_found", "session")),
    ("session=&last_seq=1", (404, "session_not_found", "session")),
    ("session=%F0%9F%98%80%00%ff&last_seq=1", (404, "session_not_found", "session")),
    ("session=TOKEN&session=TOKEN&last_seq=1", (400, "invalid_value", "session")),
    ("session=TOKEN&last_seq=-1", (400, "invalid_value", "last_seq")),
    ("session=TOKEN&last_seq=1.5", (400, "invalid_value", "last_seq")),
    ("session=TOKEN&last_seq=" + "9" * 5000, (400, "invalid_value", "last_seq")),
    ("session=TOKEN&last_seq=3", (400, "invalid_value", "last_seq")),
    ("session=TOKEN&last_seq=1&model=other", (404, "model_not_found", "model")),
]


@pytest.mark.parametrize(("query", "error"), BAD)
async def test_bad_parameters(autojump_clock, clients, query, error):
    """And the session lives on."""
    client = await cut(clients, response=None)
    assert await refused(clients, query.replace("TOKEN", client.token)) == error
    async with resumed(clients, client):
        await client.ask("again", **SHORT)
        await client.websocket.aclose()


# ---- the limit of kept events ----------------------------------------------------------------------------------------


async def test_old_events_are_dropped(autojump_clock, clients):
    """The newest mebibyte is kept, and counted."""
    async with resumable(clients) as client:
        for _ in range(8):
            await client.say("x" * 100_000)
            await client.until("conversation.item.done")
        await wait_all_tasks_blocked()
        items = 8 * (100_000 + 512)
        assert MAX_KEPT - 110_000 < clients.server.budget.num_bytes - items <= MAX_KEPT
    last = len(client.events) - 1
    for dropped in (0, 5):
        assert await refused(clients, f"session={client.token}&last_seq={dropped}") == (
            410,
            "events_dropped",
            "last_seq",
        )
    async with resumed(clients, client, last=last - 9):
        while len(client.events) <= last:
            await client.next()
        await client.websocket.aclose()
    assert await is_over(clients, client)


async def test_too_much_for_a_client_that_is_away(autojump_clock, clients):
    """It has asked for more than a mebibyte, and read nothing."""
    async with connection(clients, "resume=30", lockstep_stream_pair) as websocket:
        client = Client(websocket)
        client.token = (await client.next())["resume"]["token"]
        await client.say("x" * 100_000, id="large")
        for _ in range(20):
            await client.send("conversation.item.retrieve", item_id="large")
    before = trio.current_time()
    assert await is_over(clients, client)
    assert trio.current_time() - before < 1


async def test_a_session_that_ends_during_the_handshake(autojump_clock, clients):
    """The connection is closed, also if its client does not answer the close."""
    async with resumable(clients) as client:
        ours, theirs = lockstep_stream_pair()
        stream = clients.stream(ours, theirs)
        lines = [f"GET /v1/realtime?session={client.token}&last_seq=0 HTTP/1.1", f"host: {HOST}"]
        lines += [f"{name}: {value}" for name, value in HEADERS.items()]
        await stream.send_all("\r\n".join([*lines, "", ""]).encode())
        await wait_all_tasks_blocked()  # in the answer, which nobody reads yet
        await client.websocket.aclose()
        await wait_all_tasks_blocked()
        data = b""
        while more := await stream.receive_some(4096):
            data += more
    assert data.startswith(b"HTTP/1.1 101") and NOT_RESUMED.to_bytes(2) + b"session_not_found" in data


async def test_the_name_of_the_parameter_is_decoded(autojump_clock):
    """A client whose key has no more sessions comes back."""
    async with open_clients(api_key=KEYS, max_sessions_per_key=1) as clients:
        client = await cut(clients, response=None, **bearer())
        query = f"%73ession={client.token}&last_seq={len(client.events) - 1}"
        async with connection(clients, query, **bearer()) as client.websocket:
            await client.say("I am back")
            await client.until("conversation.item.done")
            await client.websocket.aclose()
