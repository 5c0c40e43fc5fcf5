"""Clients that have the server keep their bytes: bodies and conversations."""

import json

import pytest
import trio
from helpers.buffered_bytes import GREEDY, KEYS, LARGE, bearer, buffered, post, say
from helpers.clients import CHAT, chat, open_clients, read_all, status_and_body
from helpers.frames import read_until
from trio.testing import wait_all_tasks_blocked

from trioengine.serve.errors import OverBudget
from trioengine.serve.limits import ALWAYS_TAKEN, ByteBudget, size_of
from trioengine.serve.realtime.item import ITEM_SIZE

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
