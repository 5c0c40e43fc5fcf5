"""What the worker does for a client that vanished: nothing any more, and nothing at all if it had not begun."""

import dataclasses
from contextlib import asynccontextmanager

import pytest
import trio
from helpers.clients import CHAT, Clients, chat, first_token
from helpers.frames import HANDSHAKE, SAY, event, read_until
from test_chat_disconnects import LEAVING
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS

STEP = 0.2  # seconds
LONG = {"temperature": 0, "max_output_tokens": 300, "ignore_eos": True}


def chat_request(stream):
    async def ask(clients, client):
        await client.send("POST", CHAT, chat("you", stream=stream, max_tokens=300))

    return ask


def realtime_request(**options):
    async def ask(clients, client):
        await client.stream.send_all(HANDSHAKE)
        await read_until(client.stream, b"session.created")
        await client.stream.send_all(SAY + event("response.create", response=LONG | options))

    return ask


KINDS = {
    "whole": chat_request(stream=False),
    "stream": chat_request(stream=True),
    "realtime": realtime_request(),
    "beside": realtime_request(conversation="none"),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def ask(request):
    return request.param


@pytest.fixture(params=LEAVING)
def leave(request):
    return request.param


class Executed:
    """How many steps the worker has run for each request."""

    def __init__(self, worker):
        self.steps = {}
        self._execute, worker.runner.execute = worker.runner.execute, self._watch

    def _watch(self, output):
        for entry in output.scheduled:
            self.steps[entry.sequence.request] = self.steps.get(entry.sequence.request, 0) + 1
        return self._execute(output)


@asynccontextmanager
async def slow_clients(max_num_seqs):
    config = EngineConfig(model="toy", max_num_seqs=max_num_seqs)
    limits = dataclasses.replace(DEFAULT_LIMITS, max_num_seqs=max_num_seqs)
    engine = simulated_engine(config, limits=limits, behaviours=[Behaviour(step_time=STEP)])
    async with engine as (engine, simulation), trio.open_nursery() as nursery:
        yield Clients(engine, simulation, nursery)


def held_blocks(clients):
    core = clients.simulation.worker.core
    statistics = core.statistics()
    return core.limits.kv_blocks_total - statistics.kv_blocks_free - statistics.kv_blocks_cached


@pytest.mark.parametrize("after", [0.5, 1.05, 1.15, 5.0])
async def test_its_blocks_are_free_within_a_step(autojump_clock, ask, leave, after):
    """From the moment at which the server notices, which is at once."""
    async with slow_clients(8) as clients:
        executed = Executed(clients.simulation.worker)
        async with clients.connect() as client:
            await ask(clients, client)
            await trio.sleep(after)
            assert held_blocks(clients) > 0
            (steps,) = executed.steps.values()
            await leave(client.stream)
            await trio.sleep(STEP + 0.05)
            assert held_blocks(clients) == 0
            assert list(executed.steps.values()) in ([steps], [steps + 1])
        await clients.all_closed()
        await clients.everything_is_given_back()


async def test_its_queued_request_never_runs(autojump_clock, ask, leave):
    async with slow_clients(1) as clients:
        executed = Executed(clients.simulation.worker)
        async with clients.connect() as busy, clients.connect() as client:
            await busy.send("POST", CHAT, chat(max_tokens=50))
            await first_token(clients.engine)
            await ask(clients, client)
            await wait_all_tasks_blocked()
            assert (clients.engine.statistics().running, clients.engine.statistics().waiting) == (1, 1)
            await leave(client.stream)
            await trio.sleep(STEP + 0.05)
            assert (clients.engine.statistics().running, clients.engine.statistics().waiting) == (1, 0)
            assert (await busy.answer()).json["usage"]["completion_tokens"] == 50
        await clients.all_closed()
        await clients.everything_is_given_back()
        assert len(executed.steps) == 1
