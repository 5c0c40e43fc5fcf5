"""The reprs of the public classes: the kind, the name and the progress, in one short line."""

import pytest
import trio
from helpers.clients import open_clients
from helpers.expectations import GREEDY, LONG
from trio.testing import wait_all_tasks_blocked

from trioengine import Chunk, EngineAsleep, EngineConfig, EngineOverloaded, connect
from trioengine.testing import simulated_engine

ONE = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0, max_num_batched_tokens=64, max_sessions=2)


async def test_of_an_engine(autojump_clock):
    async with simulated_engine(ONE) as (engine, _):
        assert repr(engine) == "<Engine 'toy' awake: 0 sessions, 0 requests>"
        async with engine.open_session() as session, session.generate("one", LONG):
            assert repr(engine) == "<Engine 'toy' awake: 1 session, 1 request>"
            async with engine.open_session():
                assert repr(engine) == "<Engine 'toy' awake: 2 sessions, 1 request>"
        await engine.sleep()
        assert repr(engine) == "<Engine 'toy' asleep: 0 sessions, 0 requests>"


async def test_of_its_sessions(autojump_clock):
    async with simulated_engine(ONE) as (engine, _):
        plain, mine, late = engine.open_session(), engine.open_session(label="mine"), engine.open_session(wait=False)
        assert [repr(plain), repr(mine)] == ["<Session not entered>", "<Session 'mine' not entered>"]
        async with plain, mine:
            assert [repr(plain), repr(mine)] == [
                f"<Session {plain.id} idle detached>",
                f"<Session {mine.id} 'mine' idle detached>",
            ]
            with pytest.raises(EngineOverloaded):
                await late.__aenter__()
            assert repr(late) == "<Session without a slot>"
            async with plain.generate("one", LONG) as generation:
                await anext(generation)
                assert repr(plain) == f"<Session {plain.id} running attached>"
        assert repr(mine) == f"<Session {mine.id} 'mine' ended detached>"


async def test_of_its_generations(autojump_clock):
    async with simulated_engine(ONE) as (engine, _):
        async with engine.open_session() as session, engine.open_session() as other, trio.open_nursery() as nursery:
            first, second = session.generate("one", LONG, label="first"), other.generate("two", LONG)
            refused = other.generate("three", LONG, wait=False)
            assert [repr(first), repr(second)] == ["<Generation 'first' not entered>", "<Generation not entered>"]
            async with first:
                nursery.start_soon(second.__aenter__)
                await wait_all_tasks_blocked()
                await anext(first)
                assert [repr(first), repr(second)] == [
                    f"<Generation {first.request_id} 'first' running>",
                    "<Generation in line>",
                ]
                with pytest.raises(EngineOverloaded):
                    await refused.__aenter__()
                assert repr(refused) == "<Generation refused>"
                second.abort()
            assert repr(first) == f"<Generation {first.request_id} 'first' abort>"
            assert repr(second) == f"<Generation {second.request_id} abort>"


async def test_of_an_answer(autojump_clock, simulated):
    engine, _ = simulated
    completion = await engine.generate("hello", GREEDY)
    usage = completion.usage
    tokens = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"
    ended = completion.finish_reason.value
    assert repr(completion) == f"<Completion {completion.request_id} {completion.text!r} {ended}, {tokens}>"
    assert (
        repr(Chunk("hi", (7,)))
        == "Chunk(text='hi', token_ids=(7,), logprobs=None, prompt_logprobs=None, tool_calls=())"
    )
    assert repr(engine.statistics()).startswith("Statistics(sessions=")


async def test_of_a_client(autojump_clock):
    async with open_clients(None) as clients, connect("ws://localhost", dial=clients.dial) as client:
        session, other = client.open_session(label="mine"), client.open_session()
        generation, late = session.generate("one", LONG, label="first"), other.generate("two")
        assert repr(client) == "<Client of localhost, 0 sessions>"
        assert repr(session) == "<Session 'mine' not entered>"
        assert repr(generation) == "<Generation 'first' not entered>"
        async with session:
            assert repr(client) == "<Client of localhost, 1 session>"
            assert repr(session) == f"<Session {session.id} 'mine'>"
            async with generation:
                assert repr(generation) == "<Generation 1 'first' admitted>"
                assert (await generation.result()).finish_reason == "length"
            assert repr(generation) == "<Generation 1 'first' length>"
            await clients.engine.sleep()
            async with other:
                with pytest.raises(EngineAsleep):
                    await late.__aenter__()
                assert repr(late) == "<Generation 2 error>"
            await clients.engine.wake()
