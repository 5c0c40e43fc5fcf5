"""Clients that have the server keep the bytes of WebSocket messages, and of events that are not read."""

import random

import pytest
import trio
from helpers.buffered_bytes import GREEDY, KEYS, bearer, buffered, post, say
from helpers.clients import CHAT, HttpClient, chat, open_clients
from helpers.frames import HANDSHAKE, MASK, event, read_until
from helpers.scrapes import now
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed

from trioengine.serve.realtime.connection import TRY_AGAIN_LATER


def fragments(payload, count):
    """A text message in so many frames, the last of which is missing."""
    size = b"\xfe" + len(payload).to_bytes(2)
    first, rest = b"\x01" + size + MASK + payload, b"\x00" + size + MASK + payload
    return first + rest * (count - 1)


LAST = b"\x80\x80" + MASK


async def test_messages_that_are_on_their_way(autojump_clock):
    """Of one that has no room, nothing is kept; its end is answered by an error, and the connection is closed."""
    async with open_clients(max_buffered_bytes=100_000) as clients:
        streams = []
        for _ in range(2):
            streams.append(clients.stream())
            await streams[-1].send_all(HANDSHAKE)
            await read_until(streams[-1], b"session.created")
            await streams[-1].send_all(fragments(b"x" * 30_000, 2))
            await wait_all_tasks_blocked()
        assert buffered(clients) == 60_000
        await streams[1].send_all(LAST)
        data = await read_until(streams[1], TRY_AGAIN_LATER.to_bytes(2) + b"no room for a message: buffers_full")
        assert data.count(b'"buffers_full"') == 1
        await streams[1].aclose()
        await streams[0].send_all(LAST)
        await read_until(streams[0], b"invalid_json")
        await wait_all_tasks_blocked()
        assert buffered(clients) == 0
        await streams[0].aclose()


async def test_a_small_message_in_pieces_is_always_taken(autojump_clock):
    async with open_clients(max_buffered_bytes=10_000) as clients:
        stream = clients.stream()
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
        cancel = event("response.cancel")
        with clients.server.budget.holding(None) as rest:
            rest.charge(10_000)
            for piece in (cancel[:10], cancel[10:]):
                await stream.send_all(piece)
                await wait_all_tasks_blocked()
            await read_until(stream, b"response_cancel_not_active")
        await stream.aclose()


async def test_nothing_is_done_after_a_message_that_was_dropped(autojump_clock):
    """The question has no room, so the response is not of the conversation that its client means: none begins."""
    async with open_clients(max_buffered_bytes=100_000) as clients, clients.realtime() as client:
        await client.ask("first", **GREEDY)
        answered = clients.engine.statistics().finished
        await wait_all_tasks_blocked()
        with clients.server.budget.holding(None) as rest:
            rest.charge(99_000 - clients.server.budget.num_bytes)
            await client.say("x" * 2000)
            await client.send("response.create", response=GREEDY)
            error = (await client.next())["error"]
            assert (error["code"], error["event_id"], error["retry_after"]) == ("buffers_full", None, 1.0)
            with pytest.raises(ConnectionClosed) as closed:
                await client.next()
        reason = closed.value.reason
        assert (reason.code, reason.reason) == (TRY_AGAIN_LATER, "no room for a message: buffers_full")
        await wait_all_tasks_blocked()
        assert clients.engine.statistics().finished == answered
        assert now(clients).value("client_disconnected_total") == 0


async def test_a_response_in_progress_ends_with_the_connection_of_a_dropped_message(autojump_clock):
    """All of its bytes are given back, and its client counts among those that left in the middle."""
    async with open_clients(max_buffered_bytes=100_000) as clients, clients.realtime() as client:
        await client.say("first")
        await client.send("response.create", response=GREEDY | {"max_output_tokens": 400, "ignore_eos": True})
        await client.until("response.output_text.delta")
        with clients.server.budget.holding(None) as rest:
            rest.charge(99_500 - clients.server.budget.num_bytes)
            await client.say("x" * 2000)
            assert (await client.until("error"))["error"]["event_id"] is None
            with pytest.raises(ConnectionClosed):
                await client.until("response.done")
        await clients.all_closed()
        assert now(clients).value("client_disconnected_total") == 1


async def test_a_client_that_goes_before_it_hears_of_its_dropped_message(autojump_clock):
    async with open_clients(max_buffered_bytes=100_000, send_timeout=1000) as clients:
        stream = clients.stream(*lockstep_stream_pair())
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
        with clients.server.budget.holding(None) as rest:
            rest.charge(99_000 - clients.server.budget.num_bytes)
            for _ in range(3):
                await stream.send_all(event("conversation.item.create", **say("x" * 2000)))
            await wait_all_tasks_blocked()
            before = trio.current_time()
            await stream.aclose()
            await clients.all_closed()
        assert trio.current_time() == before


async def test_unhandled_messages_of_a_client_that_does_not_read(autojump_clock):
    """Those before the first one that has no room are handled, and then the connection is closed."""
    async with open_clients(max_buffered_bytes=300_000, send_timeout=1000) as clients:
        stream = clients.stream(*lockstep_stream_pair())
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
        large = event("conversation.item.retrieve", item_id="x" * 50_000)
        for _ in range(20):
            await stream.send_all(event("conversation.item.create", event_id="mine", **say("x" * 10_000)))
        for _ in range(10):
            await stream.send_all(large)
            await wait_all_tasks_blocked()
        assert buffered(clients) <= 300_000
        data = await read_until(stream, TRY_AGAIN_LATER.to_bytes(2))
        assert data.count(b'"conversation.item.done"') + data.count(b'"event_id": "mine"') == 20
        assert data.count(b'"event_id": null') == data.count(b"item_not_found") + 1 <= 10
        await stream.aclose()


async def test_clients_that_leave_at_random_leave_no_bytes(autojump_clock):
    """They leave at random, in the middle of bodies, messages, responses and events."""
    rng = random.Random(5)
    async with open_clients(api_key=KEYS, max_buffered_bytes=200_000, max_buffered_bytes_per_key=120_000) as clients:

        async def http(stream):
            client = HttpClient(stream)
            key = rng.choice(KEYS)
            await client.send("POST", CHAT, chat("x" * rng.randrange(50), stream=True), authorization=f"Bearer {key}")
            await client.answer()
            await stream.send_all(post(60_000, rng.randrange(60_000), key))
            await stream.receive_some()

        async def realtime(stream):
            async with clients.realtime(stream, **bearer(rng.choice(KEYS))) as client:
                while True:
                    await client.say("x" * rng.choice((1, 20_000)))
                    await client.send("session.update", session={"instructions": "y" * rng.randrange(5000)})
                    await client.respond(**GREEDY, conversation=rng.choice(("auto", "none")))

        async def visit(kind):
            stream = clients.stream()
            with trio.move_on_after(rng.random() * 0.2):
                try:
                    await kind(stream)
                except* (trio.BrokenResourceError, ConnectionClosed):
                    pass
            await trio.aclose_forcefully(stream)

        for _ in range(10):
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(visit, rng.choice((http, realtime)))
        await clients.all_closed()
        assert buffered(clients) == 0
        assert not clients.server.budget._of_keys
