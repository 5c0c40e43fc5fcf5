"""Disconnects in one table: each kind of request, each way to leave, at each moment ends alike, and at once.

The cases of one protocol are in test_chat_disconnects.py and test_realtime_disconnects.py.
"""

import dataclasses
import logging
from contextlib import asynccontextmanager

import pytest
import trio
from helpers.clients import CHAT, Clients, chat, first_token
from helpers.frames import HANDSHAKE, SAY, event, read_until
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS

CLOSED = "client disconnected: it closed the connection"
SLOW = "client disconnected: it did not read, send or answer in time"
STEP = 0.2  # seconds
LONG = {"temperature": 0, "max_output_tokens": 300, "ignore_eos": True}


async def leave_cleanly(stream):
    await stream.send_eof()


async def leave_at_once(stream):
    """Close both directions, as a reset does."""
    await trio.aclose_forcefully(stream)


LEAVING = [leave_cleanly, leave_at_once]


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
    "out of band": realtime_request(conversation="none"),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def ask(request):
    return request.param


@pytest.fixture(params=LEAVING)
def leave(request):
    return request.param


def only_session(clients):
    (session,) = clients.engine.runtime.sessions
    return session, session.request


async def ended_by_disconnect(clients, session, generation):
    """At once, for this reason, and with nothing left."""
    before = trio.current_time()
    await generation.settled.wait()
    await session.released.wait()
    assert trio.current_time() - before < 0.1
    await clients.all_closed()
    assert (generation.outcome.cause, session.end_cause) == (Cause.DISCONNECT, Cause.DISCONNECT)
    assert len(clients.server.in_flight) == 0
    statistics = clients.engine.statistics()
    assert (statistics.finished, statistics.aborted, statistics.failed) == (0, 1, 0)
    await clients.everything_is_given_back()


# ---- the request and its session ----------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "in the middle"])
async def test_the_request_ends(autojump_clock, clients, messages, caplog, ask, leave, begun):
    """Over HTTP the line of the access log comes before that of the disconnect."""
    async with clients.connect() as client:
        await ask(clients, client)
        await (first_token(clients.engine) if begun else wait_all_tasks_blocked())
        session, generation = only_session(clients)
        assert bool(generation.output.token_ids) is begun
        await leave(client.stream)
        await ended_by_disconnect(clients, session, generation)
    assert messages() == [CLOSED]
    if ask in (KINDS["whole"], KINDS["stream"]):
        assert [record.name for record in caplog.records[-2:]] == ["trioengine.access", "trioengine"]


# ---- the worker ---------------------------------------------------------------------------------------------------


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
    engine_core = clients.simulation.worker.core
    statistics = engine_core.statistics()
    return engine_core.limits.kv_blocks_total - statistics.kv_blocks_free - statistics.kv_blocks_cached


@pytest.mark.parametrize("after", [0.5, 1.05, 1.15, 5.0])
async def test_its_blocks_are_free_within_a_step(autojump_clock, ask, leave, after):
    """From the moment at which the server detects the disconnect, which is at once."""
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


# ---- the line of the log ------------------------------------------------------------------------------------------


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "trioengine")
    caplog.clear()
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "trioengine" and not record.getMessage().startswith("ready")
    ]


@pytest.mark.parametrize("how", ["close frame", "reset"])
async def test_an_idle_websocket_is_logged(autojump_clock, clients, messages, how):
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    if how == "close frame":
        await stream.send_all(b"\x88\x80\0\0\0\0")
    await stream.aclose()
    await clients.all_closed()
    assert messages() == [CLOSED]


@pytest.mark.parametrize("what", ["no ping is answered", "the head does not come"])
async def test_a_slow_client_is_logged(autojump_clock, clients, messages, what):
    stream = clients.stream()
    if what == "the head does not come":
        await stream.send_all(b"GET /")
    else:
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
    await clients.all_closed()
    assert messages() == [SLOW]
    await trio.aclose_forcefully(stream)


async def test_broken_frames_are_logged_without_their_bytes(autojump_clock, clients, messages):
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(b"\xff\xff")
    await stream.aclose()
    await clients.all_closed()
    (message,) = messages()
    assert message.startswith("client disconnected: it ")
