"""Realtime clients whose connections are cut, and which resume their sessions."""

import json
import re
from contextlib import asynccontextmanager

import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked
from trio_websocket import wrap_client_stream

from helpers.clients import HOST, Client

SHORT = {"temperature": 0, "max_output_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0, "max_output_tokens": 400, "ignore_eos": True}
_ID = re.compile(r"(sess|conv|resp|item|event|call)_[0-9a-f]{24}")


@asynccontextmanager
async def connection(clients, query, pair=memory_stream_pair, **options):
    """A WebSocket that is cut at the end of the block, without a close."""
    async with trio.open_nursery() as nursery:
        ours, theirs = pair()
        path = f"/v1/realtime?{query}"
        yield await wrap_client_stream(nursery, clients.stream(ours, theirs), HOST, path, **options)
        await trio.aclose_forcefully(ours)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def resumable(clients, seconds=30, **options):
    """A client of a session that waits so long for it, with its token; its first connection is cut at the end."""
    async with connection(clients, f"resume={seconds}", **options) as websocket:
        client = Client(websocket)
        created = await client.next()
        client.token = created["resume"]["token"]
        yield client


@asynccontextmanager
async def resumed(clients, client, last=None, **options):
    """The same client on another connection, which is cut at the end; it has the events up to `last`, or all."""
    if last is not None:
        del client.events[last + 1 :]
    query = f"session={client.token}&last_seq={len(client.events) - 1}"
    async with connection(clients, query, **options) as client.websocket:
        yield client


HEADERS = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


async def refused(clients, query, **headers):
    """The status of a handshake that is refused, and the code and parameter of its error."""
    answer = await clients.request("GET", f"/v1/realtime?{query}", **HEADERS, **headers)
    return answer.status, answer.error["code"], answer.error["param"]


async def cut(clients, seconds=30, response=LONG, **options):
    """A client that is lost in the middle of an answer, or without one."""
    async with resumable(clients, seconds, **options) as client:
        await client.say("hello")
        await client.until("conversation.item.done")
        if response is not None:
            await client.send("response.create", response=response)
            await client.until("response.output_text.delta")
    await wait_all_tasks_blocked()
    assert clients.engine.statistics().running == (response is not None)
    return client


async def is_over(clients, client):
    """Whether the session of a client has ended, with all that it held."""
    await wait_all_tasks_blocked()
    status, code, _ = await refused(clients, f"session={client.token}&last_seq=0")
    assert (status, code) == (404, "session_not_found")
    await clients.everything_is_given_back()
    return len(clients.server.realtime.sessions) == 0 and clients.server.budget.num_bytes == 0


def named(events):
    """The events with ids by the order of their appearance, and without the token."""
    names: dict[str, str] = {}
    text = json.dumps([{key: value for key, value in event.items() if key != "resume"} for event in events])
    return json.loads(_ID.sub(lambda match: names.setdefault(match[0], f"{match[1]}_{len(names)}"), text))
