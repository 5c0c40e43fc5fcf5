"""Responses with many log-probabilities: encoded in slices, in threads, and counted among the bytes that are kept."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from helpers.buffered_bytes import buffered
from helpers.clients import CHAT, Clients, chat, first_token, open_clients
from helpers.expectations import until
from trio.testing import memory_stream_pair

from trioengine import EngineConfig, open_engine
from trioengine.serve import json_encoder
from trioengine.serve.json_encoder import encode, encoded, encoded_list
from trioengine.testing import Simulation
from trioengine.testing.simulation import DEFAULT_LIMITS
from trioengine.testing.toy_model import toy_model

COMPLETIONS = "/v1/completions"
ROOM = replace(DEFAULT_LIMITS, max_model_len=2048, kv_blocks_total=512)
both_routes = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def body(path, **fields):
    if path == CHAT:
        return chat("hello", logprobs=True, top_logprobs=20, **fields)
    return {"prompt": "hello", "logprobs": 5, "temperature": 0, "ignore_eos": True, **fields}


# ---- encoding -------------------------------------------------------------------------------------------------------


def test_a_long_list_is_encoded_in_short_calls(monkeypatch):
    """One call for all of it would hold the interpreter's lock, and stop the event loop."""
    items, sizes = [{str(number): -0.5 for number in range(20)}] * 1000, []

    def watched(piece):
        sizes.append(len(piece))
        return encoded(piece)

    monkeypatch.setattr(json_encoder, "encoded", watched)
    assert json.loads(bytes(encoded_list(items))) == items
    assert sum(sizes) == len(items) and max(sizes) <= 64


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_a_list_is_encoded_as_one_value(count):
    items = [{"a": [number, "é"]} for number in range(count)]
    assert json.loads(encode({"list": encoded_list(iter(items))})) == {"list": items}


@pytest.mark.parametrize("value", [None, "", "a", "é\u2028😀", "\ud800", ["\udc00", 1.5], {"é": -9999.0}])
def test_values_are_encoded_in_ascii(value):
    data = encode({"value": encoded(value)})
    assert data.isascii() and json.loads(data) == {"value": value}


# ---- threads --------------------------------------------------------------------------------------------------------


class Gated(trio.abc.HalfCloseableStream):
    """The server's end of a connection whose client reads nothing while the gate is closed."""

    def __init__(self, stream, client):
        self._stream = stream
        self._client = client
        self.gate = trio.Event()

    def send_now(self, data):
        if not self.gate.is_set():
            return 0
        self._client.receive_stream.put_data(bytes(data))
        return len(data)

    async def send_all(self, data):
        await self.gate.wait()
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes=None):
        return await self._stream.receive_some(max_bytes)

    async def wait_send_all_might_not_block(self):
        await self.gate.wait()

    async def send_eof(self):
        await self._stream.send_eof()

    async def aclose(self):
        await self._stream.aclose()


@asynccontextmanager
async def clients_with_threads():
    """A server, and the numbers of tokens of the chunks that were rendered in threads, which take long."""
    async with trio.open_nursery() as nursery:
        simulation = Simulation(
            nursery,
            limits=ROOM,
        )
        run, counts = simulation.ports.run_in_thread, []

        async def run_in_thread(function, *args):
            counts.extend(len(each.token_ids) for each in getattr(function, "args", ()) if hasattr(each, "token_ids"))
            await trio.sleep(1)  # for many steps
            return await run(function, *args)

        ports = replace(
            simulation.ports, run_in_thread=run_in_thread, read_model=lambda path: toy_model(ROOM.max_model_len)
        )
        async with open_engine(EngineConfig(model="toy"), ports=ports) as engine:
            yield Clients(engine, simulation, nursery), counts
            nursery.cancel_scope.cancel()


def tokens_of(path, events):
    """The log-probabilities of the tokens, in their order."""
    found = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    if path == CHAT:
        return [(each["token"], each["logprob"]) for logprobs in found for each in logprobs["content"]]
    return [pair for lists in found for pair in zip(lists["tokens"], lists["token_logprobs"], strict=True)]


@both_routes
async def test_the_backlog_of_a_slow_reader_is_rendered_in_a_thread(autojump_clock, path):
    """Also while more tokens come, which follow in their order."""
    async with clients_with_threads() as (clients, counts):
        whole = (await clients.request("POST", path, body(path, max_tokens=900))).json
        counts.clear()
        ours, theirs = memory_stream_pair()
        gated = Gated(theirs, ours)
        async with clients.connect(ours, gated) as client:
            await client.send("POST", path, body(path, max_tokens=900, stream=True))
            await first_token(clients.engine)
            (session,) = clients.engine.runtime.sessions.by_id.values()
            await until(clients.engine, lambda: session.request.num_tokens >= 600)
            gated.gate.set()
            answer = await client.answer()
    assert sum(counts) >= 590
    assert tokens_of(path, answer.events[:-1]) == tokens_of(path, [whole])


# ---- bytes ----------------------------------------------------------------------------------------------------------


@both_routes
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_count_while_they_are_kept(autojump_clock, path, stream):
    async with open_clients(limits=ROOM) as clients, clients.connect() as client:
        await client.send("POST", path, body(path, max_tokens=1500, stream=stream))
        await first_token(clients.engine)
        (session,) = clients.engine.runtime.sessions.by_id.values()
        early = buffered(clients)
        await until(clients.engine, lambda: session.request.num_tokens >= 1400)
        assert early < 1 << 16 < 500_000 < buffered(clients)
        assert (await client.answer()).status == 200


async def test_small_responses_count_for_nothing(autojump_clock):
    async with open_clients(max_buffered_bytes=400) as clients:
        for path in (CHAT, COMPLETIONS):
            assert (await clients.request("POST", path, body(path, max_tokens=5))).status == 200
            answer = await clients.request("POST", path, body(path, max_tokens=5, stream=True))
            assert len(tokens_of(path, answer.events[:-1])) == 5
