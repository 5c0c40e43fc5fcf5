"""Realtime sessions that outlive a lost connection: the client comes back, and gets the events that it has not got."""

import json
import re
from contextlib import suppress

import pytest
import trio
from helpers.clients import Client, open_clients
from helpers.frames import HANDSHAKE, event, read_until
from helpers.realtime_tools import FORCED, ROOM
from helpers.resuming import LONG, SHORT, connection, cut, is_over, named, refused, resumable, resumed
from helpers.scrapes import scrape
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed

RESUMABLE = HANDSHAKE.replace(b"/realtime", b"/realtime?resume=30")


@pytest.fixture
async def clients(autojump_clock):
    """With room for tools."""
    async with open_clients(limits=ROOM) as clients:
        yield clients


async def closes(websocket):
    """The code with which the server closes a WebSocket."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            await websocket.get_message()
    return closed.value.reason.code


# ---- the events ------------------------------------------------------------------------------------------------------


async def whole(clients, response):
    """The events of an item and a response, without a cut, whose prompt is in the prefix cache."""
    for _ in range(2):
        async with resumable(clients) as client:
            await client.say("hello")
            await client.send("response.create", response=response)
            await client.until("response.done")
            await client.websocket.aclose()
    return client.events


@pytest.mark.parametrize("response", [SHORT, FORCED, {**SHORT, "conversation": "none"}], ids=["text", "call", "beside"])
async def test_a_cut_after_each_event(autojump_clock, clients, response):
    expected = await whole(clients, response)
    assert len(expected) > 12
    for count in range(1, len(expected) + 1):
        async with resumable(clients) as client:
            await client.say("hello")
            await client.send("response.create", response=response)
            await wait_all_tasks_blocked()
            while len(client.events) < count:
                await client.next()
        async with resumed(clients, client):
            while len(client.events) < len(expected):
                await client.next()
            assert named(client.events) == named(expected)
            await client.websocket.aclose()
        assert await is_over(clients, client)


async def test_a_cut_between_all_events(autojump_clock, clients):
    """One session on as many connections as it has events."""
    expected = await whole(clients, SHORT)
    async with resumable(clients) as client:
        await client.say("hello")
        await client.send("response.create", response=SHORT)
        await wait_all_tasks_blocked()
    while len(client.events) < len(expected):
        async with resumed(clients, client):
            await client.next()
    assert named(client.events) == named(expected)
    async with resumed(clients, client):
        await client.websocket.aclose()


async def test_events_go_on_while_the_client_is_away(autojump_clock, clients):
    """The answer ends meanwhile, and the next turn finds the conversation."""
    async with resumable(clients) as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        await client.until("response.output_text.delta")
    await trio.sleep(20)
    assert clients.engine.statistics().finished == 1
    async with resumed(clients, client):
        text = (await client.until("response.done"))["response"]["output"][0]["content"][0]["text"]
        deltas = [each["delta"] for each in client.events if each["type"] == "response.output_text.delta"]
        assert "".join(deltas) == text
        assert (await client.ask("again", **SHORT))["usage"]["input_token_details"]["cached_tokens"] > 0
        await client.websocket.aclose()


async def test_events_that_the_client_has_got_come_again_if_it_asks(autojump_clock, clients):
    async with resumable(clients) as client:
        await client.ask("hello", **SHORT)
        before = list(client.events)
    for last in (len(before) - 1, 3, 0):
        async with resumed(clients, client, last=last):
            while len(client.events) < len(before):
                await client.next()
            assert client.events == before
    async with resumed(clients, client):
        assert (await client.ask("again", **SHORT))["status"] == "incomplete"
        await client.websocket.aclose()


async def test_long_events_are_sent_from_their_beginning(autojump_clock, clients):
    """A client that reads half of an event gets the whole event."""
    async with resumable(clients) as client:
        await client.say("x" * 300_000)
        await client.next()
        await wait_all_tasks_blocked()
    async with resumed(clients, client):
        item = (await client.until("conversation.item.done"))["item"]
        assert len(item["content"][0]["text"]) == 300_000
        await client.websocket.aclose()


# ---- the end of the window -------------------------------------------------------------------------------------------


async def test_the_window_passes(autojump_clock, clients):
    """The answer goes on until then, and ends as one of a client that disconnects."""
    observers = list(clients.engine.observers)
    client = await cut(clients, seconds=2)
    await trio.sleep(1.9)
    assert clients.engine.statistics().running == 1
    await trio.sleep(0.2)
    assert await is_over(clients, client)
    assert clients.engine.observers == observers
    counts = await scrape(clients)
    assert counts.by_label("requests_aborted_total") == {"disconnect": 1}
    assert counts.value("client_disconnected_total") == 1


async def test_the_window_is_open_after_each_loss(autojump_clock, clients):
    client = await cut(clients, seconds=2, response=None)
    for _ in range(3):
        await trio.sleep(1.9)
        async with resumed(clients, client):
            await wait_all_tasks_blocked()
    await trio.sleep(2.1)
    assert await is_over(clients, client)


@pytest.mark.parametrize("code", [1000, 1001])
async def test_a_close_of_the_client(autojump_clock, clients, code):
    """With 1000 it has no need of the session; a page that is left closes with 1001."""
    async with resumable(clients) as client:
        await client.ask("hello", **SHORT)
        await client.websocket.aclose(code)
        if code == 1000:
            assert await is_over(clients, client)
            return
    async with resumed(clients, client):
        await client.ask("again", **SHORT)
        await client.websocket.aclose()


async def test_without_the_parameter_a_session_ends_with_its_connection(autojump_clock, clients):
    async with connection(clients, "model=toy") as websocket:
        assert "resume" not in json.loads(await websocket.get_message())
        assert len(clients.server.realtime.sessions) == 0


async def sleep(clients):
    assert (await clients.request("POST", "/sleep?level=1&mode=keep")).status == 200
    assert (await clients.request("POST", "/wake_up")).status == 200


async def update(clients):
    await clients.engine.update_weights("toy")


async def abort_all(clients):
    assert (await clients.request("POST", "/abort_request", {"abort_all": True})).status == 200


async def drain(clients):
    await clients.server.drain(10)


@pytest.mark.parametrize("response", [None, LONG], ids=["idle", "answering"])
@pytest.mark.parametrize("end", [sleep, update, abort_all, drain])
async def test_operators_end_the_window(autojump_clock, clients, end, response):
    async with resumable(clients) as other:
        client = await cut(clients, response=response)
        before = trio.current_time()
        await end(clients)
        assert trio.current_time() - before < 3
        await wait_all_tasks_blocked()
        assert len(clients.server.realtime.sessions) == (end is not drain)
        if end is not drain:
            assert (await refused(clients, f"session={client.token}&last_seq=0"))[0] == 404
            assert (await other.ask("hello", **SHORT))["status"] == "incomplete", "a client that is there goes on"
            await other.websocket.aclose()


async def test_a_client_that_is_lost_while_the_server_drains(autojump_clock, clients):
    async with trio.open_nursery() as nursery:
        async with resumable(clients) as client:
            await client.say("hello")
            await client.send("response.create", response=LONG)
            await client.until("response.output_text.delta")
            nursery.start_soon(clients.server.drain, 10)
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        assert len(clients.server.realtime.sessions) == 0


async def test_a_server_that_shuts_down_closes_the_connection(autojump_clock, clients):
    async with resumable(clients) as client, trio.open_nursery() as nursery:
        await client.ask("hello", **SHORT)
        nursery.start_soon(clients.server.drain, 10)
        assert await closes(client.websocket) == 1001


async def test_a_client_that_floods_is_disconnected(autojump_clock, clients):
    """Its session does not wait for it."""
    content = [{"type": "input_text", "text": "x" * 60_000}]
    large = event("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    stream = clients.stream(*lockstep_stream_pair())
    await stream.send_all(RESUMABLE)
    await read_until(stream, b"session.created")
    await stream.send_all(2 * large + 65 * event("conversation.item.retrieve", item_id="x"))
    await wait_all_tasks_blocked()
    await read_until(stream, (1008).to_bytes(2) + b"more than 64 unhandled events")
    await stream.aclose()
    await wait_all_tasks_blocked()
    assert len(clients.server.realtime.sessions) == 0


# ---- other connections -----------------------------------------------------------------------------------------------


async def test_a_connection_takes_over(autojump_clock, clients):
    """The one before is closed, and each event comes once on the newer one."""
    async with resumable(clients) as client:
        old = client.websocket
        await client.say("hello")
        await client.send("response.create", response=LONG)
        for _ in range(3):
            await client.until("response.output_text.delta")
        async with resumed(clients, client):
            assert await closes(old) == 4001
            response = (await client.until("response.done"))["response"]
            deltas = [each["delta"] for each in client.events if each["type"] == "response.output_text.delta"]
            assert "".join(deltas) == response["output"][0]["content"][0]["text"]
            await client.websocket.aclose()
            assert await is_over(clients, client)


async def test_connections_that_were_replaced_make_room(autojump_clock):
    """Their clients do not answer the close, so that each would take a place for seconds."""
    async with open_clients(max_connections=3) as clients:
        async with resumable(clients) as client:
            pass
        handshake = HANDSHAKE.replace(b"/realtime", f"/realtime?session={client.token}&last_seq=0".encode())
        for _ in range(6):
            stream = clients.stream()
            await stream.send_all(handshake)
            await read_until(stream, b"101")
            await wait_all_tasks_blocked()
        async with resumed(clients, client):
            assert (await client.ask("hello", **SHORT))["status"] == "incomplete"
            await client.websocket.aclose()
        assert await is_over(clients, client)


async def test_two_connections_at_once(autojump_clock, clients):
    """One of them has the session, and the other is closed."""
    client = await cut(clients)
    codes = []

    async def resume():
        async with connection(clients, f"session={client.token}&last_seq=1") as websocket:
            try:
                while json.loads(await websocket.get_message())["type"] != "response.done":
                    pass
                await websocket.aclose()
                codes.append(1000)
            except ConnectionClosed as exc:
                codes.append(exc.reason.code)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(resume)
    assert sorted(codes) == [1000, 4001]
    assert await is_over(clients, client)


async def test_a_client_that_comes_at_the_last_moment(autojump_clock, clients):
    client = await cut(clients, seconds=2)
    await trio.sleep(1.999)
    async with resumed(clients, client):
        await client.until("response.done")
        await client.websocket.aclose()
    assert await is_over(clients, client)


async def test_a_client_that_comes_when_the_time_is_over(autojump_clock, clients):
    """It has its session, or is refused; nothing is left either way."""
    client = await cut(clients, seconds=2)
    await trio.sleep(2)
    with suppress(ExceptionGroup):  # of one ConnectionRejected
        async with resumed(clients, client):
            await client.websocket.aclose()
    assert await is_over(clients, client)


async def test_the_worker_is_lost_meanwhile(autojump_clock, clients):
    """The answer goes on with the next worker."""
    client = await cut(clients)
    clients.simulation.worker.kill()
    await trio.sleep(10)
    async with resumed(clients, client):
        assert (await client.until("response.done"))["response"]["status"] == "incomplete"
        await client.websocket.aclose()


async def test_a_connection_that_is_half_open_delays_nobody(autojump_clock, clients):
    """Its client is gone and the network has not said so: a write to it goes on until its time is over."""
    async with connection(clients, "resume=30", lockstep_stream_pair) as old:
        client = Client(old)
        client.token = (await client.next())["resume"]["token"]
        await client.say("hello")
        await client.until("conversation.item.done")
        await client.send("response.create", response=LONG)
        await client.until("response.output_text.delta")
        before = trio.current_time()
        async with resumed(clients, client):
            await client.next()
            assert trio.current_time() - before < 1
            await client.until("response.done")
            assert trio.current_time() - before < 10
            await client.websocket.aclose()
    assert await is_over(clients, client)


async def test_a_client_that_is_silent_is_lost(autojump_clock, clients):
    """It does not answer pings; its session waits for it from then on."""
    stream = clients.stream()
    await stream.send_all(RESUMABLE)
    token = re.search(rb'"token": "(\w+)"', await read_until(stream, b'"token"'))[1].decode()
    while await stream.receive_some():
        pass
    await trio.sleep(29)
    async with connection(clients, f"session={token}&last_seq=0") as websocket:
        await websocket.send_message("{")
        assert json.loads(await websocket.get_message())["sequence_number"] == 1
        await websocket.aclose()
