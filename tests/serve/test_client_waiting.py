"""trioengine.connect and an engine that is full: who does not wait is told so, who waits is served, or may leave."""

from contextlib import nullcontext

import pytest
import trio
from clients import Clients, open_clients
from params import GREEDY, LONG
from realtime_texts import assistant, reference, user
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, EngineOverloaded, SamplingParams, TimedOut, connect
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine


@pytest.fixture
async def crowded(autojump_clock):
    """A server with one place for a request."""
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with connect("http://localhost/", dial=clients.dial) as client:
            yield client, clients
        with trio.fail_after(60):
            await clients.all_closed()
            await clients.everything_is_given_back()


async def test_an_engine_that_is_full(autojump_clock, crowded):
    client, clients = crowded
    async with client.open_session() as session, session.generate("hello", LONG) as generation:
        with pytest.raises(EngineOverloaded) as refused:
            await client.generate("other", GREEDY, wait=False)
        assert refused.value.retry_after > 0
        assert (await generation.result()).text == reference(clients, [user("hello")], 200, ignore_eos=True)


async def test_who_waits_for_a_full_engine_is_served(autojump_clock, crowded):
    client, clients = crowded
    async with client.open_session() as session, client.open_session() as other, trio.open_nursery() as nursery:

        async def read(task_status):
            async with session.generate("hello", LONG) as generation:
                task_status.started()
                await generation.result()

        await nursery.start(read)
        async with other.generate("other", GREEDY, wait=True) as generation:
            assert (await generation.result()).text == reference(clients, [user("other")])
        assert other.history == [user("other"), assistant(generation.completion.text)]


@pytest.mark.parametrize("how", ["timeout", "abort", "cancel"])
async def test_who_waits_may_leave(autojump_clock, crowded, how):
    client, clients = crowded
    async with client.open_session() as session, client.open_session() as other:
        async with session.generate("hello", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)):
            timeout = 0.2 if how == "timeout" else None
            waiting = other.generate("other", GREEDY, wait=True, timeout=timeout)
            async with trio.open_nursery() as nursery:
                if how == "abort":
                    nursery.start_soon(abort_later, waiting)
                with trio.move_on_after(0.2 if how == "cancel" else 60):
                    with pytest.raises(TimedOut) if how == "timeout" else nullcontext():
                        async with waiting:
                            pass
            assert waiting.completion.finish_reason is FinishReason.ABORT
            assert waiting.completion.cause is (Cause.TIMEOUT if how == "timeout" else Cause.CLIENT)
            assert other.history == []
        async with other.generate("again", GREEDY) as generation:
            assert (await generation.result()).text == reference(clients, [user("again")])


async def abort_later(generation):
    await wait_all_tasks_blocked()
    generation.abort()


async def test_a_generation_that_was_not_entered_is_not_waited_for(autojump_clock, remote):
    async with remote.open_session() as session:
        with pytest.raises(RuntimeError, match="was not entered"):
            await session.generate("hi").result()


# ---- a place for the connection -----------------------------------------------------------------------------------


async def test_the_timeout_bounds_the_wait_for_a_place(autojump_clock):
    async with open_clients(max_connections=1) as clients, connect("ws://localhost", dial=clients.dial) as client:
        async with client.open_session():
            before = trio.current_time()
            with trio.fail_after(60), pytest.raises(TimedOut) as refused:
                await client.generate("hello", GREEDY, timeout=5.5, wait=True)
            assert refused.value.completion.cause is Cause.TIMEOUT
            assert refused.value.__cause__.code == "too_many_connections"
            assert trio.current_time() - before == pytest.approx(5.5)


async def test_the_time_until_there_is_a_place_is_of_the_timeout(autojump_clock):
    async with open_clients(max_connections=1) as clients, connect("ws://localhost", dial=clients.dial) as client:
        await clients.engine.sleep()
        async with trio.open_nursery() as nursery:
            async with client.open_session():
                before, completions = trio.current_time(), []

                async def ask():
                    with pytest.raises(TimedOut) as caught:
                        await client.generate("hello", GREEDY, timeout=5.5, wait=True)
                    completions.append(caught.value.completion)

                nursery.start_soon(ask)
                await trio.sleep(2.5)  # simulated: a part of its time
        assert trio.current_time() - before == pytest.approx(5.5)
        assert [completion.cause for completion in completions] == [Cause.TIMEOUT]
