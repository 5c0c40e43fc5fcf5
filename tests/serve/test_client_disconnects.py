"""trioengine.connect when either side goes: calls that wait end, the WebSocket is closed, the server left empty."""

import pytest
import trio
from helpers.clients import Clients
from helpers.params import GREEDY
from helpers.realtime_texts import assistant, reference, user
from trio.testing import wait_all_tasks_blocked

from trioengine import ConnectionLost, EngineClosed, EngineOverloaded, SamplingParams, connect
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def cut(clients):
    """The server's side of the latest connection breaks."""
    await trio.aclose_forcefully(clients.served[-1])


# ---- the server goes ----------------------------------------------------------------------------------------------


async def test_a_connection_that_breaks_in_the_middle_of_an_answer(autojump_clock, remote, clients):
    """What came is read first; then the reader is told, and so is whoever asks for more."""
    async with remote.open_session() as session:
        async with session.generate("hello", LONG, keep_partial=True) as generation:
            text = (await anext(generation)).text
            await cut(clients)
            with pytest.raises(ConnectionLost) as lost:
                async for chunk in generation:
                    text += chunk.text
        broken = "the connection to the server broke off: the server died, or the network failed"
        assert (lost.value.code, str(lost.value)) == (1006, broken)
        assert text == generation._state.text
        assert reference(clients, [user("hello")], 400, ignore_eos=True).startswith(text)
        with pytest.raises(ConnectionLost):
            _ = generation.completion
        assert session.history == []
        with pytest.raises(ConnectionLost):
            async with session.generate("more"):
                pass
        before = trio.current_time()
    assert trio.current_time() == before


async def test_a_connection_that_breaks_while_a_request_is_entering(autojump_clock, remote, clients):
    """It waits for the worker's next start."""
    async with remote.open_session() as session, trio.open_nursery() as nursery:
        clients.simulation.worker.exit(-9)
        nursery.start_soon(cut_soon, clients)
        with pytest.raises(ConnectionLost):
            await session.generate("hello", LONG, wait=True).__aenter__()
    await clients.engine.ready()


async def cut_soon(clients):
    await wait_all_tasks_blocked()
    await cut(clients)


async def test_a_session_that_breaks_while_idle(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        await (await session.generate("hello", GREEDY).__aenter__()).result()
        await cut(clients)
        await session.ended()
        assert len(session.history) == 2
        with pytest.raises(ConnectionLost):
            await session.generate("more").__aenter__()


async def test_a_drain_finishes_the_answer_and_then_closes(autojump_clock, remote, clients):
    async with remote.open_session() as session, trio.open_nursery() as nursery:
        async with session.generate("hello", LONG) as generation:
            await anext(generation)
            nursery.start_soon(clients.server.drain)
            completion = await generation.result()
        assert completion.text == reference(clients, [user("hello")], 400, ignore_eos=True)
        await session.ended()
        with pytest.raises(EngineClosed, match="shutting down"):
            await session.generate("more").__aenter__()


async def test_a_drain_that_runs_out_of_time_aborts(autojump_clock, remote, clients):
    async with remote.open_session() as session, trio.open_nursery() as nursery:
        async with session.generate("hello", LONG, keep_partial=True) as generation:
            await anext(generation)
            nursery.start_soon(clients.server.drain, 0)
            completion = await generation.result()
        assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.SHUTDOWN)
        assert session.history == [user("hello"), assistant(completion.text)]


async def test_an_engine_that_drains_refuses(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        await clients.engine.drain()
        with pytest.raises(EngineClosed):
            await session.generate("hello").__aenter__()


# ---- the client goes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ticks", range(48))
async def test_cancelled_anywhere_the_connection_is_closed(autojump_clock, clients, ticks):
    """From dialling to the goodbye: afterwards the server has neither connection nor session."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_after, ticks, scope)
            async with connect("ws://localhost", dial=clients.dial) as client:
                async with client.open_session() as session, session.generate("hello", GREEDY) as generation:
                    await generation.result()
    await clients.all_closed()
    while clients.engine.statistics().sessions:
        await clients.engine.runtime.gate.changed()


@pytest.mark.parametrize("ticks", range(48))
async def test_a_session_that_is_cancelled_anywhere_leaves_the_client_usable(autojump_clock, remote, clients, ticks):
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_after, ticks, scope)
            async with remote.open_session() as session, session.generate("hello", GREEDY) as generation:
                await generation.result()
    await clients.all_closed()
    assert (await remote.generate("hello", GREEDY)).text == reference(clients, [user("hello")])
    assert repr(remote) == "<Client of localhost, 0 sessions>"


async def cancel_after(ticks, scope):
    for _ in range(ticks):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_leaving_a_session_in_the_middle_of_an_answer(autojump_clock, remote, clients):
    async with remote.open_session() as session:
        generation = await session.generate("hello", LONG).__aenter__()
        await anext(generation)
        before = trio.current_time()
    assert (generation.completion.finish_reason, generation.completion.cause) == (FinishReason.ABORT, Cause.CLIENT)
    await clients.all_closed()
    while clients.engine.statistics().sessions:
        await clients.engine.runtime.gate.changed()
    assert trio.current_time() - before < 0.1
    assert clients.engine.statistics().aborted == 1


async def test_leaving_the_client_ends_its_sessions(autojump_clock, clients):
    async with connect("ws://localhost", dial=clients.dial) as client:
        generations = []
        for _ in range(3):
            session = await client.open_session().__aenter__()
            generations.append(await session.generate("hello", LONG).__aenter__())
    for generation in generations:
        with pytest.raises(ConnectionLost):
            await generation.result()
    await clients.all_closed()


async def test_an_exception_comes_out_as_it_is(autojump_clock, clients):
    with pytest.raises(KeyError):
        async with connect("ws://localhost", dial=clients.dial) as client:
            async with client.open_session() as session, session.generate("hello", LONG):
                raise KeyError
    await clients.all_closed()


async def test_a_request_that_waits_for_another_to_stop_is_told_of_the_end(autojump_clock, remote, clients):
    """The first was aborted, and the server has not answered yet."""
    async with remote.open_session() as session, trio.open_nursery() as nursery:
        first = await session.generate("hello", LONG).__aenter__()
        first.abort()
        nursery.start_soon(cut_soon, clients)
        with pytest.raises(ConnectionLost):
            await session.generate("more", LONG).__aenter__()
        assert (await first.result()).cause is Cause.CLIENT


# ---- servers that are not there, or full --------------------------------------------------------------------------


async def test_nobody_listens():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    async with connect(f"ws://127.0.0.1:{port}") as client:
        with pytest.raises(ConnectionLost) as lost:
            await client.generate("hello")
    url = f"http://127.0.0.1:{port}"
    assert str(lost.value) == f"cannot connect to {url}: connection refused; is 'trioengine serve' running there?"


async def test_a_name_without_an_address():
    async with connect("ws://nonesuch.invalid:1") as client:
        with pytest.raises(ConnectionLost, match=r"^cannot connect to http://nonesuch\.invalid:1: [^;]+$"):
            await client.generate("hello")


async def test_more_connections_than_the_server_takes(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        async with connect("ws://localhost", dial=clients.dial) as client:
            async with trio.open_nursery() as nursery:
                async with client.open_session():
                    with pytest.raises(EngineOverloaded) as refused:
                        async with client.open_session(wait=False):
                            pass
                    assert (refused.value.code, refused.value.retry_after) == ("too_many_connections", 1.0)
                    await nursery.start(waiting, client)
                    await trio.sleep(3 * refused.value.retry_after)  # it asks again, and again
            assert engine.statistics().finished == 1
        await clients.all_closed()


async def waiting(client, task_status):
    task_status.started()
    completion = await client.generate("hello", GREEDY, wait=True)
    assert completion.finish_reason is FinishReason.STOP
