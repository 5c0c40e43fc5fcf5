"""Clients of chat completions that leave, or do not read: the request ends at once, and nobody else notices."""

import json
import logging

import pytest
import trio
from clients import CHAT, Clients, HttpClient, chat, events_of
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked

from trioengine import EngineConfig
from trioengine.core.lifecycle import Cause
from trioengine.core.messages import AddMessage
from trioengine.serve.streaming import KEEP_ALIVE, SEND_TIMEOUT
from trioengine.testing import Simulation, simulated_engine, toy_answer

LONG = {"max_tokens": 400}


async def leave_cleanly(stream):
    await stream.send_eof()


async def leave_at_once(stream):
    await trio.aclose_forcefully(stream)


LEAVING = [leave_cleanly, leave_at_once]


async def ended_by_disconnect(clients, session, generation):
    """At once, for this reason, and with nothing left."""
    before = trio.current_time()
    await generation.settled.wait()
    await clients.all_closed()
    await session.ended()
    assert trio.current_time() - before < 0.1
    assert (generation.outcome.cause, session.end_cause) == (Cause.DISCONNECT, Cause.DISCONNECT)
    assert len(clients.server.completions) == 0
    statistics = clients.engine.statistics()
    assert (statistics.finished, statistics.aborted, statistics.failed) == (0, 1, 0)
    await clients.everything_is_given_back()


def only_session(clients):
    (session,) = clients.engine._sessions
    return session, session.generation


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(autojump_clock, clients, caplog, leave, stream):
    caplog.set_level(logging.INFO, "trioengine")
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=stream, **LONG))
        await wait_all_tasks_blocked()
        session, generation = only_session(clients)
        assert not generation.answer.token_ids
        await leave(client.stream)
        await ended_by_disconnect(clients, session, generation)
    assert caplog.messages == ["a client went away: it closed the connection"]


@pytest.mark.parametrize("leave", LEAVING)
async def test_in_the_middle_of_a_stream(autojump_clock, clients, leave):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True, **LONG))
        await client.head()
        await client.piece()
        session, generation = only_session(clients)
        await leave(client.stream)
        await ended_by_disconnect(clients, session, generation)


@pytest.mark.parametrize("leave", LEAVING)
async def test_in_the_middle_of_a_whole_answer(autojump_clock, clients, leave):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(**LONG))
        await trio.sleep(0.5)
        session, generation = only_session(clients)
        assert generation.answer.token_ids
        await leave(client.stream)
        await ended_by_disconnect(clients, session, generation)


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("stream", [False, True])
async def test_while_its_prompt_is_prepared(autojump_clock, clients, leave, stream):
    """In a thread, whose result nobody wants: the worker never hears of it."""
    clients.simulation.thread_passes = 10_000
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat("x" * 10_000, stream=stream))
        while not clients.engine.statistics().preparing:
            await trio.lowlevel.checkpoint()
        session, generation = only_session(clients)
        await leave(client.stream)
        await ended_by_disconnect(clients, session, generation)
    assert not [message for message in clients.simulation.worker.received if isinstance(message, AddMessage)]


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
    limits = Simulation().limits
    one_at_a_time = type(limits)(
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        kv_blocks_total=limits.kv_blocks_total,
        block_size=limits.block_size,
        max_num_seqs=1,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    async with simulated_engine(config, limits=one_at_a_time) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect() as busy, clients.connect() as client:
            await busy.send("POST", CHAT, chat(**LONG))
            await trio.sleep(0.5)
            await client.send("POST", CHAT, chat("you", stream=stream, **LONG))
            await trio.sleep(0.5)
            session = list(engine._sessions)[-1]
            generation = session.generation
            assert (engine.statistics().running, engine.statistics().waiting) == (1, 1)
            await leave(client.stream)
            await generation.settled.wait()
            assert generation.outcome.cause is Cause.DISCONNECT
            assert not generation.answer.token_ids
            assert engine.statistics().in_flight == 1 if hasattr(engine.statistics(), "in_flight") else True
            assert (await busy.answer()).json["usage"]["completion_tokens"] == 400
        await clients.all_closed()
        await clients.everything_is_given_back()
        assert (engine.statistics().finished, engine.statistics().aborted) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reader_that_never_reads(autojump_clock, clients, stream):
    """Its answer is merged, its connection closed after 20 s of a send that does not move; others are not delayed."""
    stream_pair = lockstep_stream_pair()
    async with clients.connect(*stream_pair) as client:
        await client.send("POST", CHAT, chat(stream=stream, **LONG))
        await trio.sleep(1)
        before = trio.current_time()
        assert (await clients.chat()).status == 200
        assert trio.current_time() - before < 1
        await clients.all_closed()
        assert SEND_TIMEOUT - 1 < trio.current_time() - before < SEND_TIMEOUT + 5
    await clients.everything_is_given_back()


async def test_a_reader_that_never_reads_ends_its_request(autojump_clock):
    """The cause is the disconnect, however long the answer would have taken."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with clients.connect(*lockstep_stream_pair()) as client:
            await client.send("POST", CHAT, chat(stream=True, **LONG))
            await trio.sleep(1)
            simulation.worker.stall(3600)
            session, generation = only_session(clients)
            await clients.all_closed()
            assert generation.outcome.cause is session.end_cause is Cause.DISCONNECT
        nursery.cancel_scope.cancel()


async def test_a_slow_reader_gets_merged_chunks(autojump_clock, clients):
    async with clients.connect(*lockstep_stream_pair()) as client:
        await client.send("POST", CHAT, chat(stream=True, **LONG))
        await trio.sleep(10)
        assert clients.engine.statistics().finished == 1
        answer = await client.answer()
    tokenizer = clients.engine.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    assert text == tokenizer.decode(toy_answer(prompt, 400, ignore_eos=True))
    assert len(answer.events) < 10


async def test_silence_is_broken(autojump_clock, clients):
    """By a comment every 15 s, also before the first token; the answer is whole all the same."""
    async with clients.connect() as client:
        clients.simulation.worker.stall(40)
        before = trio.current_time()
        await client.send("POST", CHAT, chat(stream=True))
        await client.head()
        for count in (1, 2):
            assert await client.piece() == b": keep-alive\n\n"
            assert trio.current_time() - before == pytest.approx(KEEP_ALIVE * count)
        await trio.sleep(11)
        clients.simulation.worker.recover()
        clients.simulation.worker.kill()
        events = events_of(await client.piece())
        assert events[0]["error"]["code"] == "worker_lost"
        assert events[1] == "[DONE]"
        assert await client.piece() is None
    await clients.engine.ready()


async def test_silence_in_the_middle(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True))
        await client.head()
        await client.piece()
        before = trio.current_time()
        clients.simulation.worker.stall(3600)
        pieces = [await client.piece()]
        while pieces[-1] != b": keep-alive\n\n":
            pieces.append(await client.piece())
        assert KEEP_ALIVE <= trio.current_time() - before < KEEP_ALIVE + 0.1
        await client.stream.aclose()
        await clients.all_closed()
        clients.simulation.worker.kill()
    await clients.engine.ready()


async def test_a_client_that_leaves_during_a_silence(autojump_clock, clients):
    async with clients.connect(*lockstep_stream_pair()) as client:
        await client.send("POST", CHAT, chat(stream=True))
        clients.simulation.worker.stall(3600)
        await trio.sleep(KEEP_ALIVE + 1)  # the comment is being sent
        session, generation = only_session(clients)
        before = trio.current_time()
        await clients.all_closed()
        assert trio.current_time() - before == pytest.approx(SEND_TIMEOUT - 1)
        assert generation.outcome.cause is session.end_cause is Cause.DISCONNECT
        clients.simulation.worker.kill()
    await clients.engine.ready()


async def test_too_much_ahead_in_a_stream(autojump_clock, clients):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=True, **LONG))
        await client.head()
        await client.piece()
        session, generation = only_session(clients)
        await client.stream.send_all(b"x" * ((64 << 10) + 1))
        await ended_by_disconnect(clients, session, generation)


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
