"""Requests of an engine that is full or asleep: refused, or waiting, according to `wait`."""

from contextlib import nullcontext

import pytest
import trio
from helpers.sides import GREEDY, LONG, SHORT, assistant, user
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineAsleep, EngineConfig, EngineOverloaded, TimedOut
from trioengine.core.types import Cause, FinishReason

ONE_SLOT = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0, max_num_batched_tokens=64)
one_slot = pytest.mark.parametrize("config", [ONE_SLOT], ids=[""])


@one_slot
async def test_a_full_engine_refuses_a_request_that_does_not_wait(autojump_clock, side, session):
    async with session.generate("hello", LONG) as generation:
        with pytest.raises(EngineOverloaded) as refused:
            await side.api.generate("other", GREEDY, wait=False)
        assert refused.value.is_full
        assert refused.value.retry_after > 0
        assert (await generation.result()).text == side.answer([user("hello")], LONG)


@one_slot
@pytest.mark.parametrize("wait", [None, True])
async def test_a_request_waits_for_a_slot(autojump_clock, side, session, wait):
    async with side.api.open_session() as other, trio.open_nursery() as nursery:

        async def read(task_status):
            async with session.generate("hello", LONG) as generation:
                task_status.started()
                await generation.result()

        await nursery.start(read)
        completion = await other.ask("other", GREEDY, wait=wait)
        assert completion.text == side.answer([user("other")])
        assert other.history == [user("other"), assistant(completion.text)]


async def test_a_sleeping_engine_refuses_a_request_unless_it_is_to_wait(autojump_clock, side, session):
    await side.engine.sleep()
    for wait in (None, False):
        with pytest.raises(EngineAsleep, match=r"the engine is asleep; 'trioengine wake' or Engine.wake wakes it$"):
            await side.api.generate("x", SHORT, wait=wait)
        with pytest.raises(EngineAsleep):
            await session.ask("x", SHORT, wait=wait)
    assert session.history == []
    await side.engine.wake()
    assert (await session.ask("hello", GREEDY)).text == side.answer([user("hello")])


async def test_a_request_waits_for_the_wake(autojump_clock, side, session):
    await side.engine.sleep()

    async def wake():
        await trio.sleep(10)  # simulated: a client is refused and asks again, many times
        await side.engine.wake()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wake)
        completion = await session.ask("hello", GREEDY, wait=True)
    assert completion.text == side.answer([user("hello")])
    assert session.history == [user("hello"), assistant(completion.text)]


@one_slot
@pytest.mark.parametrize("how", ["timeout", "abort", "cancel"])
@pytest.mark.parametrize("why", ["full", "asleep"])
async def test_a_waiting_request_may_leave(autojump_clock, side, session, how, why):
    async with side.api.open_session() as other, session.generate("hello", LONG):
        if why == "asleep":
            await side.engine.sleep()
        waiting = other.generate("other", GREEDY, wait=True, timeout=0.2 if how == "timeout" else None)
        async with trio.open_nursery() as nursery:
            if how == "abort":
                nursery.start_soon(abort_later, waiting)
            with trio.move_on_after(0.2 if how == "cancel" else 60):
                with pytest.raises(TimedOut) if how == "timeout" else nullcontext():
                    async with waiting:
                        pass
        completion = waiting.completion
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.cause is (Cause.TIMEOUT if how == "timeout" else Cause.CLIENT)
        assert other.history == []
    if why == "asleep":
        await side.engine.wake()
    async with side.api.open_session() as another:
        assert (await another.ask("again", GREEDY)).text == side.answer([user("again")])


async def abort_later(generation):
    await wait_all_tasks_blocked()
    generation.abort()
