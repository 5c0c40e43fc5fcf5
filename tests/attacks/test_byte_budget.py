"""Clients that have the server keep their bytes: bodies, messages, conversations and events that are not read."""

import json
import random

import pytest
import trio
from clients import CHAT, HttpClient, chat, open_clients, read_all, status_and_body
from frames import HANDSHAKE, MASK, event, read_until
from scrapes import now
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed

from trioengine.serve.byte_budget import ALWAYS_TAKEN, ByteBudget, size_of
from trioengine.serve.problem import OverBudget
from trioengine.serve.realtime.connection import TRY_AGAIN_LATER
from trioengine.serve.realtime.items import ITEM_SIZE

KEYS = ("k" * 16, "l" * 16)
GREEDY = {"temperature": 0, "max_output_tokens": 5}
LARGE = 20_000


def post(size, sent, key=KEYS[0]):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + b"x" * sent


def bearer(key=KEYS[0]):
    return {"extra_headers": [(b"Authorization", b"Bearer " + key.encode())]}


def say(text, **fields):
    content = [{"type": "input_text", "text": text}]
    return {"item": {"type": "message", "role": "user", "content": content, **fields}}


def buffered(clients):
    """As the gauge has it."""
    return now(clients).value("buffered_bytes")


# ---- bodies ---------------------------------------------------------------------------------------------------------


async def test_unfinished_bodies_of_a_key(autojump_clock):
    """Over the budget of a key its bodies are refused, those of another are not; a body that is given up makes room."""
    async with open_clients(api_key=KEYS, max_buffered_bytes_per_key=100_000) as clients:
        streams = [clients.stream() for _ in range(3)]
        for stream in streams:
            await stream.send_all(post(40_001, 40_000))
            await wait_all_tasks_blocked()
        answer = await read_all(streams[2])
        status, body = status_and_body(answer)
        assert (status, body["error"]["code"], body["error"]["type"]) == (429, "key_buffers_full", "rate_limit_error")
        assert "--max-buffered-bytes-per-key" in body["error"]["message"]
        assert b"retry-after: 1\r\n" in answer
        assert buffered(clients) == 80_000
        assert status_and_body(await clients.http(post(40_000, 40_000, KEYS[1])))[0] == 400
        await streams[0].aclose()
        await wait_all_tasks_blocked()
        assert status_and_body(await clients.http(post(40_000, 40_000)))[0] == 400
        await streams[1].send_all(b"x")
        assert status_and_body(await read_all(streams[1]))[0] == 400
        await trio.sleep(10)  # simulated: refused bodies are read to their end meanwhile
        assert buffered(clients) == 0
        for stream in streams[1:]:
            await stream.aclose()


async def test_unfinished_bodies_of_all(autojump_clock):
    async with open_clients(max_buffered_bytes=100_000) as clients:
        streams = [clients.stream() for _ in range(2)]
        for stream in streams:
            await stream.send_all(post(60_001, 60_000))
            await wait_all_tasks_blocked()
        status, body = status_and_body(await read_all(streams[1]))
        assert (status, body["error"]["code"], body["error"]["type"]) == (503, "buffers_full", "server_error")
        assert "--max-buffered-bytes)" in body["error"]["message"]
        await streams[0].aclose()
        await wait_all_tasks_blocked()
        assert (await clients.chat()).status == 200
        assert buffered(clients) == 0
        await streams[1].aclose()


async def test_a_body_counts_until_the_engine_has_the_prompt(autojump_clock):
    async with open_clients() as clients, clients.connect() as client:
        body = json.dumps(chat(max_tokens=400, stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await client.stream.send_all(head + body[:-1])
        await wait_all_tasks_blocked()
        assert buffered(clients) == len(body) - 1
        await client.stream.send_all(body[-1:])
        answer = await read_until(client.stream, b"\n\n")
        assert (answer[:12], buffered(clients)) == (b"HTTP/1.1 200", 0)
        await read_until(client.stream, b"[DONE]\n\n\r\n0\r\n\r\n")
        await wait_all_tasks_blocked()
        assert buffered(clients) == 0


# ---- a conversation -------------------------------------------------------------------------------------------------


async def test_items_of_a_key(autojump_clock):
    """An item that has no room is refused by an event, and nothing is lost; when others have gone, it has room."""
    async with open_clients(api_key=KEYS, max_buffered_bytes_per_key=16 * LARGE) as clients:
        async with clients.realtime(**bearer()) as client:
            async with clients.realtime(**bearer()) as other:
                for _ in range(2):
                    await other.say("y" * LARGE)
                    assert (await other.next())["type"] == "conversation.item.added"
                    assert (await other.next())["type"] == "conversation.item.done"
                await client.say("short")
                await client.until("conversation.item.done")
                await client.send("conversation.item.create", event_id="mine", **say("x" * LARGE))
                error = (await client.next())["error"]
                assert (error["code"], error["type"], error["event_id"]) == (
                    "key_buffers_full",
                    "rate_limit_error",
                    "mine",
                )
                assert error["retry_after"] == 1.0
                assert (await client.respond(**GREEDY))["status"] in ("completed", "incomplete")
                async with clients.realtime(**bearer(KEYS[1])) as stranger:
                    await stranger.say("x" * LARGE)
                    await stranger.until("conversation.item.done")
            await wait_all_tasks_blocked()
            await client.say("x" * LARGE)
            await client.until("conversation.item.done")


async def test_the_bytes_of_a_conversation(autojump_clock):
    """They are given back by events that take items away, and at the end."""
    async with open_clients() as clients, clients.realtime() as client:
        assert buffered(clients) == 0

        async def after(name, **fields):
            await client.send(name, **fields)
            while (await client.next())["type"] not in (f"{name}d", "conversation.item.done"):
                pass
            await wait_all_tasks_blocked()
            return buffered(clients)

        assert await after("conversation.item.create", **say("x" * 100, id="a")) == ITEM_SIZE + 100
        assert await after("conversation.item.create", **say("ü" * 100, id="b")) == 2 * ITEM_SIZE + 500
        assert await after("conversation.item.delete", item_id="b") == ITEM_SIZE + 100
        assert await after("session.update", session={"instructions": "i" * 50}) == ITEM_SIZE + 150
        assert await after("session.update", session={"instructions": None}) == ITEM_SIZE + 100
        answer = (await client.respond(**GREEDY))["output"][0]
        text = answer["content"][0]["text"]
        await wait_all_tasks_blocked()
        assert buffered(clients) == 2 * ITEM_SIZE + 100 + len(text)
        truncated = {"item_id": answer["id"], "content_index": 0, "text_end": 1}
        assert await after("conversation.item.truncate", **truncated) == 2 * ITEM_SIZE + 101
        for item in ("a", answer["id"]):
            left = await after("conversation.item.delete", item_id=item)
        assert left == 0


async def test_a_conversation_has_a_limit_of_its_own(autojump_clock):
    """In bytes: characters beyond ASCII count four."""
    async with open_clients(max_conversation_size=2 * ITEM_SIZE + 4000) as clients, clients.realtime() as client:
        await client.say("ü" * 900)
        await client.until("conversation.item.done")
        await client.send("conversation.item.create", event_id="mine", **say("ü" * 200))
        error = (await client.next())["error"]
        assert (error["code"], error["event_id"]) == ("conversation_too_large", "mine")
        assert "5024 bytes (--max-conversation-size)" in error["message"]
        await client.say("ü" * 100)
        await client.until("conversation.item.done")
        assert buffered(clients) == 2 * ITEM_SIZE + 4000


async def test_instructions_and_events_have_room_or_are_refused(autojump_clock):
    """An event that repeats a long text needs room, too."""
    async with open_clients(max_buffered_bytes=16 * LARGE) as clients, clients.realtime() as client:
        await client.send("session.update", session={"instructions": "x" * LARGE})
        assert (await client.next())["type"] == "session.updated"
        await client.send("session.update", session={"instructions": "y" * 3 * LARGE})
        assert (await client.next())["error"]["code"] == "buffers_full"
        await client.say("x" * LARGE, id="long")
        await client.until("conversation.item.done")
        async with clients.realtime() as other:
            with clients.server.budget.holding(None) as rest:
                rest.charge(11 * LARGE)
                for name, fields in (
                    ("conversation.item.retrieve", {"item_id": "long"}),
                    ("session.update", {"session": {"temperature": 0.5}}),
                ):
                    await client.send(name, **fields)
                    assert (await client.next())["error"]["code"] == "buffers_full"
            await other.say("x" * (LARGE // 3))
            await other.until("conversation.item.done")
        await client.send("conversation.item.retrieve", item_id="long")
        assert (await client.next())["item"]["id"] == "long"


async def test_input_of_a_response_counts_while_it_runs(autojump_clock):
    async with open_clients() as clients, clients.realtime() as client:
        item = say("x" * 100)["item"]
        long = {"max_output_tokens": 300, "temperature": 0, "ignore_eos": True}
        await client.send("response.create", response={"input": [item], "conversation": "none", **long})
        await client.until("response.output_text.delta")
        assert buffered(clients) >= ITEM_SIZE + 100
        await client.until("response.done")
        await wait_all_tasks_blocked()
        assert buffered(clients) == 0


# ---- messages and events --------------------------------------------------------------------------------------------


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


# ---- the budget itself ----------------------------------------------------------------------------------------------


def test_a_budget():
    budget = ByteBudget(100, 60)
    with budget.holding(b"a") as first, budget.holding(b"a") as second, budget.holding(None) as third:
        first.take(60)
        with pytest.raises(OverBudget) as refused:
            second.take(1)
        assert refused.value.status == 429
        third.take(40)
        with pytest.raises(OverBudget) as refused:
            third.take(1)
        assert refused.value.status == 503
        second.charge(5)
        assert (budget.num_bytes, first.num_bytes, second.num_bytes, third.num_bytes) == (105, 60, 5, 40)
        first.give_back(60)
        with pytest.raises(AssertionError, match="are given back"):
            first.give_back(1)
        first.num_bytes = 0
        budget.num_bytes = 45
    assert budget.num_bytes == 0


def test_sizes():
    assert (size_of("abc"), size_of("abü"), size_of(b"\xff\xff"), size_of("")) == (3, 12, 2, 0)
    assert size_of("x" * ALWAYS_TAKEN) == ALWAYS_TAKEN
