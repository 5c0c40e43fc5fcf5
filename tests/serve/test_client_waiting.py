"""trioengine.connect and a server whose connections are all taken: calls wait for one, within their timeout."""

import pytest
import trio
from helpers.clients import Clients, open_clients
from helpers.params import GREEDY, LONG
from trio.testing import wait_all_tasks_blocked

from trioengine import SessionEnded, TimedOut, connect
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine


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


async def test_the_wait_for_a_connection_has_its_time(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        async with connect("ws://localhost", dial=clients.dial) as client, client.open_session():
            with pytest.raises(TimedOut) as caught:
                async with client.open_session(timeout=3.5):
                    raise AssertionError("there was no place")
            assert caught.value.completion is None
        await clients.all_closed()


async def test_one_that_waits_for_a_connection_is_ended(autojump_clock):
    """At once: it does not wait for a place at the server."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        async with connect("ws://localhost", dial=clients.dial) as client, client.open_session():
            completions = []

            async def ask():
                completions.append(await client.generate("x", LONG, label="mine", wait=True))

            async with trio.open_nursery() as asking:
                asking.start_soon(ask)
                await wait_all_tasks_blocked()
                before = trio.current_time()
                assert [client.abort("mine"), client.abort("mine")] == [1, 0]
            assert trio.current_time() == before
            (completion,) = completions
            assert (completion.cause, completion.text) == (Cause.CLIENT, "")
        await clients.all_closed()


async def test_a_session_that_waits_for_its_server_is_ended(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        async with connect("ws://localhost", dial=clients.dial) as client, client.open_session():
            late = client.open_session(wait=True)

            async def enter():
                with pytest.raises(SessionEnded, match="client"):
                    await late.__aenter__()

            async with trio.open_nursery() as entering:
                entering.start_soon(enter)
                await wait_all_tasks_blocked()
                late.end()
            await late.ended()
        await clients.all_closed()
