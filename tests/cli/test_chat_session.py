"""The session of a chat whose server is lost, and whose worker is."""

from contextlib import asynccontextmanager
from functools import partial

import trio
from trio.testing import wait_all_tasks_blocked

from trioengine import SamplingParams
from trioengine.cli import chat_session
from trioengine.cli.chat_session import local_session, open_chat
from trioengine.core.config import EngineConfig
from trioengine.testing import simulated_engine

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@asynccontextmanager
async def opened(engine, histories, history, notify):
    histories.append(list(history))
    async with engine.open_session(history=history) as session:
        yield session


async def test_the_next_session_has_the_conversation_of_the_lost_one(autojump_clock):
    histories = []
    async with simulated_engine() as (engine, _), open_chat(partial(opened, engine, histories), print) as chat:
        session = await chat.open()
        assert await chat.open() is session
        await session.ask("hello", GREEDY)
        conversation = session.history
        await chat.close()
        await chat.close()
        assert session.end_cause is not None
        assert (await chat.open()).history == conversation
        await chat.clear()
        await chat.close()
        await chat.open()
    assert histories == [[], conversation, []]


async def test_a_conversation_that_is_forgotten_without_a_connection(autojump_clock):
    histories = []
    async with simulated_engine() as (engine, _), open_chat(partial(opened, engine, histories), print) as chat:
        await (await chat.open()).ask("hello", GREEDY)
        await chat.close()
        await chat.clear()
        await chat.open()
    assert histories == [[], []]


async def test_opening_the_next_session_can_be_cancelled(autojump_clock):
    """Ctrl+C does so: no session is left behind, and the next message opens one with the whole conversation."""
    never, histories = trio.Event(), []

    @asynccontextmanager
    async def opened_or_not(history, notify):
        if len(histories) == 1:
            histories.append(list(history))
            await never.wait()
        async with opened(engine, histories, history, notify) as session:
            yield session

    async with simulated_engine() as (engine, _), open_chat(opened_or_not, print) as chat:
        await (await chat.open()).ask("hello", GREEDY)
        await chat.close()
        with trio.move_on_after(1) as scope:
            await chat.open()
        assert scope.cancelled_caught
        assert not engine.statistics().sessions
        session = await chat.open()
        assert len(session.history) == 2
        assert engine.statistics().sessions == 1
    assert histories == [[], list(session.history), list(session.history)]


async def test_a_lost_worker_is_reported(autojump_clock, monkeypatch):
    notices, simulations = [], []

    @asynccontextmanager
    async def open_engine(config, **options):
        async with simulated_engine() as (engine, simulation):
            simulations.append(simulation)
            yield engine

    monkeypatch.setattr(chat_session, "open_engine", open_engine)
    async with local_session(EngineConfig(), (), notices.append) as session:
        await wait_all_tasks_blocked()
        simulations[0].worker.exit(-9)
        await session.ask("hello", GREEDY, wait=True)
        await wait_all_tasks_blocked()
    assert notices == ["the worker was lost; the engine is restarting", "the engine is awake"]
