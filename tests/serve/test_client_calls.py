"""The shorter calls over a connection: the same as an engine's."""

import inspect

import pytest
import trio
from clients import Clients
from params import GREEDY, LONG
from realtime_texts import assistant, reference, user
from trio.testing import wait_all_tasks_blocked

from trioengine import (
    Client,
    Engine,
    EngineAsleep,
    EngineConfig,
    EngineOverloaded,
    SamplingParams,
    Session,
    TimedOut,
    connect,
)
from trioengine.client.session import Session as RemoteSession
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Engine.open_session, Client.open_session),
        (Engine.generate, Client.generate),
        (Engine.abort, Client.abort),
        (Session.generate, RemoteSession.generate),
        (Session.ask, RemoteSession.ask),
    ],
)
def test_an_engine_and_a_client_take_the_same(ours, theirs):
    """Under the same names, with the same defaults."""
    ours, theirs = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in theirs.values()
    ]


async def test_one_whole_answer_with_keywords(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        completion = await session.ask("hello", GREEDY, max_tokens=5, ignore_eos=True)
        assert completion.text == reference(clients, [user("hello")], 5, ignore_eos=True)
        assert session.history == [user("hello"), assistant(completion.text)]
        async with session.generate("more", max_tokens=3, temperature=0) as generation:
            assert generation.params == SamplingParams(max_tokens=3, temperature=0)
    completion = await remote.generate("hello", temperature=0, max_tokens=5, ignore_eos=True)
    assert completion.text == reference(clients, [user("hello")], 5, ignore_eos=True)


async def test_what_is_no_sampling_parameter(autojump_clock, remote):
    async with remote.open_session() as session:
        with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
            session.generate("hello", max_token=3)
        with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
            await remote.generate("hello", max_token=3)


async def test_a_generation_that_is_awaited_says_how_it_is_read(autojump_clock, remote):
    async with remote.open_session() as session:
        with pytest.raises(TypeError, match="cannot be awaited"):
            await session.generate("hello")


@pytest.fixture
async def crowded(autojump_clock):
    """A server with one place for a request."""
    config = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        async with connect("http://localhost/", dial=clients.dial) as client:
            yield client, clients
        await clients.all_closed()


async def test_by_default_a_request_waits_for_a_slot(autojump_clock, crowded):
    client, clients = crowded
    async with client.open_session() as session, trio.open_nursery() as nursery:

        async def read(task_status):
            async with session.generate("hello", LONG) as generation:
                task_status.started()
                await generation.result()

        await nursery.start(read)
        with pytest.raises(EngineOverloaded) as refused:
            await client.generate("other", GREEDY, wait=False)
        assert refused.value.is_full
        assert (await client.generate("other", GREEDY)).text == reference(clients, [user("other")])


async def test_the_wait_for_a_slot_has_its_time(autojump_clock, crowded):
    client, _ = crowded
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    async with client.open_session() as session, session.generate("hello", long):
        with pytest.raises(TimedOut) as caught:
            await client.generate("other", GREEDY, timeout=0.2)
    assert (caught.value.completion.cause, caught.value.completion.text) == (Cause.TIMEOUT, "")
    slots = "all 1 request slots are taken (max_num_seqs 1 + max_num_queued_reqs 0)"
    assert str(caught.value) == f"timed out after 0.2 s while waiting: {slots}"
    assert isinstance(caught.value.__cause__, EngineOverloaded)


async def test_by_default_nobody_waits_for_a_wake(autojump_clock, remote, clients):
    await clients.engine.sleep()
    for wait in (None, False):
        with pytest.raises(EngineAsleep):
            await remote.generate("hello", GREEDY, wait=wait)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: remote.generate("hello", GREEDY, wait=True))
        await wait_all_tasks_blocked()
        await clients.engine.wake()


async def test_the_wait_for_a_connection_has_its_time(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        async with connect("ws://localhost", dial=clients.dial) as client, client.open_session():
            with pytest.raises(TimedOut) as caught:
                async with client.open_session(timeout=3.5):
                    raise AssertionError("there was no place")
            assert caught.value.completion is None
        await clients.all_closed()
