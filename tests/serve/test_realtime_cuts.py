"""Random connections of one session: cut, half-read, taken over and late, in the middle of its responses."""

import random

import pytest
import trio
from helpers.clients import open_clients
from helpers.realtime_tools import FORCED, ROOM
from helpers.resuming import resumable, resumed
from trio.testing import lockstep_stream_pair, memory_stream_pair

RESPONSES = [FORCED, {"max_output_tokens": 300, "ignore_eos": True}, {"conversation": "none", "max_output_tokens": 100}]
PAIRS = [memory_stream_pair, lockstep_stream_pair]


async def read(client, count):
    for _ in range(count):
        await client.next()  # which checks the number of each event


async def act(client, choose):
    """One step of a client."""
    kind = choose.choice(["say", "respond", "respond", "cancel", "read", "read", "read"])
    if kind == "say":
        await client.say("x" * choose.choice([1, 100, 20_000]))
    elif kind == "respond":
        await client.send("response.create", response=choose.choice(RESPONSES))
    elif kind == "cancel":
        await client.send("response.cancel")
    else:
        await read(client, choose.randrange(60))


async def connect_once(clients, client, choose):
    last = max(0, len(client.events) - choose.randint(1, 4))
    async with resumed(clients, client, last, pair=choose.choice(PAIRS)):
        with trio.move_on_after(choose.uniform(0, 6)):
            for _ in range(choose.randint(0, 4)):
                await act(client, choose)
        if choose.random() < 0.2:
            async with resumed(clients, client):
                with trio.move_on_after(0.1):
                    await read(client, choose.randrange(6))
    if choose.random() < 0.3:
        await trio.sleep(choose.uniform(0, 15))


@pytest.mark.parametrize("seed", range(12))
async def test_a_session_on_many_connections(autojump_clock, seed):
    """Each event comes once and in order, and each response ends."""
    choose = random.Random(seed)
    async with open_clients(limits=ROOM) as clients:
        async with resumable(clients, seconds=20) as client:
            await client.ask("hello", **FORCED)
        for _ in range(30):
            await connect_once(clients, client, choose)
        async with resumed(clients, client):
            with trio.move_on_after(30):
                await read(client, 1_000_000)
            await client.websocket.aclose()
        ids = {
            name: {event["response"]["id"] for event in client.events if event["type"] == name}
            for name in ("response.created", "response.done")
        }
        assert ids["response.created"] == ids["response.done"] != set()
