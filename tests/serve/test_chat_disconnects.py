"""Clients of chat completions that disconnect, or do not read; test_disconnects.py has the common cases."""

import dataclasses
import json
from contextlib import asynccontextmanager

import pytest
import trio
from helpers.clients import CHAT, FAILING, Clients, HttpClient, chat, events_of, finished, first_token
from test_disconnects import LEAVING, ended_by_disconnect, only_session
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked

from trioengine import EngineConfig
from trioengine.core.messages import AddMessage
from trioengine.core.types import Cause
from trioengine.serve.body import KEEP_ALIVE
from trioengine.serve.config import ServeConfig
from trioengine.testing import simulated_engine, toy_answer
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS

LONG = {"max_tokens": 400}
SEND_TIMEOUT = ServeConfig().send_timeout


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
async def test_while_its_prompt_is_prepared(autojump_clock, leave, stream):
    """In a thread, whose result nobody wants: the worker never hears of it."""
    async with simulated_engine(thread_threshold=100) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        simulation.thread_passes = 10_000
        async with clients.connect() as client:
            await client.send("POST", CHAT, chat("x" * 200, stream=stream))
            while not engine.statistics().preparing:
                await trio.lowlevel.checkpoint()
            session, generation = only_session(clients)
            await leave(client.stream)
            await ended_by_disconnect(clients, (session, generation))
        assert not [message for message in simulation.worker.received if isinstance(message, AddMessage)]


@pytest.mark.parametrize("leave", LEAVING)
async def test_while_its_body_is_parsed(autojump_clock, clients, leave):
    clients.simulation.thread_passes = 10_000
    async with clients.connect() as client:
        await client.send("POST", CHAT, json.dumps(chat()).encode() + b" " * (70 << 10))
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        await leave(client.stream)
        await clients.all_closed()
    assert clients.engine.statistics().received == 0


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
async def test_while_it_is_queued(autojump_clock, leave, stream):
    """A queued request of a client that is gone never runs, and its place is free for another."""
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=1)
    one_at_a_time = dataclasses.replace(DEFAULT_LIMITS, max_num_seqs=1)
    async with simulated_engine(config, limits=one_at_a_time) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect() as busy, clients.connect() as client:
            await busy.send("POST", CHAT, chat(**LONG))
            await first_token(engine)
            await client.send("POST", CHAT, chat("you", stream=stream, **LONG))
            await wait_all_tasks_blocked()
            session = list(engine.runtime.sessions)[-1]
            generation = session.request
            assert (engine.statistics().running, engine.statistics().waiting) == (1, 1)
            await leave(client.stream)
            await generation.settled.wait()
            assert generation.outcome.cause is Cause.DISCONNECT
            assert not generation.output.token_ids
            assert (engine.statistics().running, engine.statistics().waiting) == (1, 0)
            assert (await busy.answer()).json["usage"]["completion_tokens"] == 400
        await clients.all_closed()
        await clients.everything_is_given_back()
        assert (engine.statistics().finished, engine.statistics().aborted) == (1, 1)


async def test_a_reader_that_never_reads_ends_its_request(autojump_clock):
    """The cause is the disconnect, however long the answer would have taken."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect(*lockstep_stream_pair()) as client:
            await client.send("POST", CHAT, chat(stream=True, **LONG))
            await first_token(engine)
            simulation.worker.stall(3600)
            session, generation = only_session(clients)
            await clients.all_closed()
            assert generation.outcome.cause is session.end_cause is Cause.DISCONNECT
        nursery.cancel_scope.cancel()


async def test_a_slow_reader_gets_merged_chunks(autojump_clock, clients):
    async with clients.connect(*lockstep_stream_pair()) as client:
        await client.send("POST", CHAT, chat(stream=True, **LONG))
        await finished(clients.engine, 1)
        answer = await client.answer()
    tokenizer = clients.engine.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    assert text == tokenizer.decode(toy_answer(prompt, 400, ignore_eos=True))
    assert len(answer.events) < 10


@asynccontextmanager
async def slow_clients(step_time, config=None):
    """Clients of an engine that takes its time for each token."""
    async with simulated_engine(config, behaviours=[Behaviour(step_time=step_time)]) as (engine, simulation):
        async with trio.open_nursery() as nursery:
            yield Clients(engine, simulation, nursery)


async def test_silence_is_broken(autojump_clock):
    """By a comment every 15 s, also before the first token; the answer is whole all the same."""
    async with slow_clients(40) as clients, clients.connect() as client:
        before = trio.current_time()
        await client.send("POST", CHAT, chat(stream=True, max_tokens=2))
        await client.head()
        pieces = []
        while (piece := await client.piece()) is not None:
            pieces.append((round(trio.current_time() - before), piece))
        comment = b": keep-alive\n\n"
        assert [(when, piece == comment) for when, piece in pieces] == [
            (KEEP_ALIVE, True),
            (2 * KEEP_ALIVE, True),
            (40, False),
            (40 + KEEP_ALIVE, True),
            (40 + 2 * KEEP_ALIVE, True),
            (80, False),
        ]
        events = events_of(b"".join(piece for _, piece in pieces))
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-1] == "[DONE]"


async def test_a_whole_answer_takes_its_time_in_silence(autojump_clock):
    async with slow_clients(40) as clients:
        answer = await clients.chat(max_tokens=2)
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 2)


async def test_a_client_that_does_not_read_the_comment(autojump_clock):
    async with slow_clients(200) as clients, clients.connect(*lockstep_stream_pair()) as client:
        before = trio.current_time()
        await client.send("POST", CHAT, chat(stream=True))
        await wait_all_tasks_blocked()
        session, generation = only_session(clients)
        await clients.all_closed()
        assert trio.current_time() - before == pytest.approx(KEEP_ALIVE + SEND_TIMEOUT)
        assert generation.outcome.cause is session.end_cause is Cause.DISCONNECT


async def test_an_error_after_a_comment_is_told_in_the_stream(autojump_clock):
    async with slow_clients(200, FAILING) as clients, clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True))
        await client.head()
        assert await client.piece() == b": keep-alive\n\n"
        clients.simulation.worker.exit(-9)
        answer = events_of(await client.piece())
        assert (answer[0]["error"]["code"], answer[1]) == ("worker_lost", "[DONE]")
        assert await client.piece() is None


async def test_too_much_ahead_in_a_stream(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True, **LONG))
        await client.head()
        await client.piece()
        session, generation = only_session(clients)
        await client.stream.send_all(b"x" * ((64 << 10) + 1))
        await ended_by_disconnect(clients, (session, generation))


async def test_the_server_aborts(autojump_clock):
    """Not the client's doing, and not told as such."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect() as client:
            await client.send("POST", CHAT, chat(stream=True, **LONG))
            await client.head()
            session, generation = only_session(clients)
            engine.abort_all(Cause.SHUTDOWN)
            nursery.cancel_scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
    assert generation.outcome.cause is Cause.SHUTDOWN
    assert session.end_cause is not None


async def test_a_pipelined_request_waits_its_turn(autojump_clock, clients):
    stream = clients.stream()
    first, second = HttpClient(stream), HttpClient(stream)
    await first.send("POST", CHAT, chat(stream=True))
    await second.send("GET", "/health")
    answer = await first.answer()
    assert answer.events[-1] == "[DONE]"
    await trio.aclose_forcefully(stream)
