"""trioengine.connect and an engine that sleeps: who does not wait is told so, who waits is served."""

from contextlib import nullcontext

import pytest
import trio
from params import GREEDY, LONG
from realtime_texts import assistant, reference, user
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineAsleep, TimedOut, connect
from trioengine.core.types import Cause, FinishReason


async def test_who_does_not_wait_is_told(autojump_clock, remote, clients):
    await clients.engine.sleep()
    with pytest.raises(EngineAsleep, match=r"the engine is asleep; 'trioengine wake' or Engine.wake wakes it$"):
        await remote.generate("hello", GREEDY)
    async with remote.open_session() as session:
        with pytest.raises(EngineAsleep):
            async with session.generate("hello", GREEDY):
                pass
        assert session.history == []
        await clients.engine.wake()
        async with session.generate("hello", GREEDY) as generation:
            assert (await generation.result()).text == reference(clients, [user("hello")])


async def test_who_waits_is_served(autojump_clock, remote, clients):
    async with remote.open_session() as session, trio.open_nursery() as nursery:
        await clients.engine.sleep()

        async def wake():
            await trio.sleep(10)  # simulated: it asks, is refused and asks again, many times
            await clients.engine.wake()

        nursery.start_soon(wake)
        async with session.generate("hello", GREEDY, wait=True) as generation:
            assert (await generation.result()).text == reference(clients, [user("hello")])
        assert session.history == [user("hello"), assistant(generation.completion.text)]


@pytest.mark.parametrize("how", ["timeout", "abort", "cancel"])
async def test_who_waits_may_leave(autojump_clock, remote, clients, how):
    await clients.engine.sleep()
    async with remote.open_session() as session:
        waiting = session.generate("hello", GREEDY, wait=True, timeout=3.5 if how == "timeout" else None)
        async with trio.open_nursery() as nursery:
            if how == "abort":
                nursery.start_soon(abort_later, waiting)
            with trio.move_on_after(3.5 if how == "cancel" else 60):
                with pytest.raises(TimedOut) if how == "timeout" else nullcontext():
                    async with waiting:
                        pass
        assert waiting.completion.finish_reason is FinishReason.ABORT
        assert waiting.completion.cause is (Cause.TIMEOUT if how == "timeout" else Cause.CLIENT)
        assert session.history == []
        await clients.engine.wake()
        async with session.generate("again", GREEDY) as generation:
            assert (await generation.result()).text == reference(clients, [user("again")])


async def abort_later(generation):
    await wait_all_tasks_blocked()
    generation.abort()


async def test_an_answer_that_the_sleep_aborts_has_its_cause(autojump_clock, remote, clients):
    async with remote.open_session() as session, session.generate("hello", LONG) as generation:
        await anext(generation)
        await clients.engine.sleep()
        completion = await generation.result()
        assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.SLEEP)
    await clients.engine.wake()


async def test_an_answer_that_is_kept(autojump_clock, remote, clients):
    async with remote.open_session() as session, session.generate("hello", LONG) as generation:
        await anext(generation)
        await clients.engine.sleep(mode="keep")
        await clients.engine.wake()
        assert (await generation.result()).text == reference(clients, [user("hello")], 200, ignore_eos=True)


async def test_who_wants_to_know_is_told(autojump_clock, clients):
    told = []
    async with connect("ws://localhost", dial=clients.dial, on_state=told.append) as client:
        async with client.open_session():
            await clients.engine.sleep()
            await wait_all_tasks_blocked()
            async with client.open_session():  # a connection of its own
                await wait_all_tasks_blocked()
                await clients.engine.wake()
                await wait_all_tasks_blocked()
    assert told == ["sleeping", "sleeping", "awake", "awake"]
