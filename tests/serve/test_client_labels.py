"""trioengine.connect: requests are ended by their id or label, as an engine's."""

import pytest
import trio
from clients import Clients
from params import LONG
from trio.testing import wait_all_tasks_blocked

from trioengine import SessionEnded, connect
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine


async def test_a_request_is_ended_by_its_id(autojump_clock, remote):
    async with remote.open_session() as session, session.generate("one", LONG) as generation:
        await anext(generation)
        assert [remote.abort(99), remote.abort(generation.request_id), remote.abort(generation.request_id)] == [0, 1, 0]
        assert (await generation.result()).cause is Cause.CLIENT
    assert remote.abort(generation.request_id) == 0


async def test_all_of_a_label_are_ended(autojump_clock, remote):
    """In sessions of their own, and in an open one; those of another label, or of none, go on."""
    completions = {}

    async def ask(number, label):
        completions[number] = await remote.generate("x", LONG, label=label)

    async with remote.open_session(label="mine") as session, session.generate("x", LONG, label="mine") as generation:
        await anext(generation)
        async with trio.open_nursery() as nursery:
            for number, label in enumerate(["mine", "other", None]):
                nursery.start_soon(ask, number, label)
            await wait_all_tasks_blocked()
            assert [remote.abort(label) for label in ("nobody's", "mine", "mine")] == [0, 2, 0]
        assert (await generation.result()).cause is Cause.CLIENT
    assert {number: completions[number].cause for number in range(3)} == {0: Cause.CLIENT, 1: None, 2: None}


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


async def test_a_request_behind_another_of_its_session_is_ended(autojump_clock, remote, clients):
    """It waits for the end of one that was aborted, whose worker hangs."""
    async with remote.open_session() as session, trio.open_nursery() as nursery:
        completions = []

        async def ask():
            completions.append(await session.ask("two", LONG, label="second"))

        async with session.generate("one", LONG) as first:
            await anext(first)
            clients.simulation.worker.hang()
            first.abort()
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert completions == []
            assert [remote.abort("second"), remote.abort("second")] == [1, 0]
        await clients.engine.ready()
    assert [completion.cause for completion in completions] == [Cause.CLIENT]


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


async def test_an_aborted_request_that_was_not_entered_has_its_outcome(autojump_clock, remote):
    async with remote.open_session() as session:
        generation = session.generate("one", LONG)
        assert generation.abort()
        assert (generation.completion.cause, generation.completion.text) == (Cause.CLIENT, "")
