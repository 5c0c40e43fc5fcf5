"""Chat completions that fail: with a status before the first token, in the stream after it."""

import pytest
import trio
from helpers.clients import CHAT, Clients, chat, events_of, where_a_loss_fails
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig
from trioengine.core.lifecycle import PowerEvent
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine

LONG = {"max_tokens": 400}


async def first_piece(client, **fields):
    """A stream whose first piece has come."""
    await client.send("POST", CHAT, chat(stream=True, **LONG | fields))
    status, _ = await client.head()
    assert status == 200
    return await client.piece()


async def rest(client):
    """The events of the rest of a stream."""
    return events_of(await client.rest())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_engine_says_429(autojump_clock, stream):
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=1)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect() as one, clients.connect() as two:
            for client in (one, two):
                await client.send("POST", CHAT, chat(**LONG))
            await wait_all_tasks_blocked()
            answer = await clients.chat(stream=stream)
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "overloaded")
            assert (await one.answer()).status == (await two.answer()).status == 200
        await clients.all_closed()
        assert engine.statistics().rejected == 1


@pytest.mark.parametrize("event", [PowerEvent.DRAIN, PowerEvent.CLOSE])
async def test_an_engine_that_ends_says_503(autojump_clock, event):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        engine.runtime.gate.change_power(event)
        answer = await clients.chat()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.error["code"] == "shutting_down"


async def test_a_worker_that_restarts_says_503(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8, restart_delays=(3.0,))
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        simulation.worker.exit(-9)
        await engine.runtime.gate.changed()
        answer = await clients.chat()
        assert (answer.status, answer.error["type"], answer.error["code"]) == (503, "server_error", "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        await engine.ready()
        assert (await clients.chat()).status == 200


@where_a_loss_fails
async def test_a_worker_that_dies_before_the_first_token(autojump_clock, clients):
    for stream in (False, True):
        async with clients.connect() as client:
            await client.send("POST", CHAT, chat(stream=stream))
            await wait_all_tasks_blocked()
            clients.simulation.worker.exit(-9)
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (503, "worker_lost")
            assert answer.error["message"] == "the worker process was lost before the answer was whole"
        await clients.engine.ready()


@where_a_loss_fails
async def test_a_worker_that_dies_in_the_middle(autojump_clock, clients):
    async with clients.connect() as client:
        await first_piece(client)
        clients.simulation.worker.exit(-9)
        *_, error, done = await rest(client)
        assert done == "[DONE]"
        assert error["error"]["code"] == "worker_lost"
    await clients.engine.ready()


async def test_a_request_that_fails_alone(autojump_clock, clients):
    async with clients.connect() as client:
        await first_piece(client)
        (session,) = clients.engine.runtime.sessions
        clients.simulation.worker.runner.fail_requests.add(session.request.id)
        *_, error, done = await rest(client)
        assert (error["error"]["code"], done) == ("sampling_failed", "[DONE]")


async def test_a_whole_answer_that_fails(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(**LONG))
        await wait_all_tasks_blocked()
        (session,) = clients.engine.runtime.sessions
        clients.simulation.worker.runner.fail_requests.add(session.request.id)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (500, "sampling_failed")
        assert answer.error["type"] == "server_error"


@pytest.mark.parametrize(("cause", "status"), [(Cause.SHUTDOWN, 503), (Cause.ABORT_ALL, 500), (Cause.TIMEOUT, 500)])
async def test_an_abort_is_an_error(autojump_clock, clients, cause, status):
    async with clients.connect() as whole, clients.connect() as early, clients.connect() as middle:
        await first_piece(middle)
        await whole.send("POST", CHAT, chat(**LONG))
        await early.send("POST", CHAT, chat(stream=True, **LONG))
        await wait_all_tasks_blocked()
        clients.engine.abort_all(cause)
        for client in (whole, early):
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (status, cause.value)
        *_, error, done = await rest(middle)
        assert (error["error"]["code"], done) == (cause.value, "[DONE]")
        assert error["error"]["type"] == "server_error"


async def test_a_bug_in_the_middle(autojump_clock, clients, caplog, monkeypatch):
    async with clients.connect() as client:
        await first_piece(client)
        (session,) = clients.engine.runtime.sessions
        monkeypatch.setattr(session.request, "_num_texts_read", "x")
        *_, error, done = await rest(client)
        assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
        assert error["error"]["message"] == "internal error"
    assert caplog.records
    caplog.clear()


async def test_drain_finishes_a_stream(autojump_clock, clients):
    async with clients.connect() as client, trio.open_nursery() as nursery:
        await first_piece(client)
        nursery.start_soon(clients.server.drain)
        events = await rest(client)
        assert (events[-2]["choices"][0]["finish_reason"], events[-1]) == ("length", "[DONE]")
