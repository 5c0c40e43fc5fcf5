"""trioengine.connect when either side goes: whoever waits is told, the WebSocket closed, the server left empty."""

import json
from contextlib import suppress

import pytest
import trio
from clients import Clients
from realtime_texts import assistant, reference, user
from trio.testing import memory_stream_pair, wait_all_tasks_blocked
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from trioengine import (
    ConnectionLost,
    EngineClosed,
    EngineOverloaded,
    FinishReason,
    RequestRejected,
    SamplingParams,
    connect,
)
from trioengine.client.connection import CLOSE_TIMEOUT, CONNECT_TIMEOUT, PING_INTERVAL
from trioengine.client.websocket import MAX_MESSAGE
from trioengine.core.lifecycle import Cause
from trioengine.testing import simulated_engine

GREEDY = SamplingParams(temperature=0, max_tokens=40)
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
        assert lost.value.code == 1006
        assert text == generation.text
        assert reference(clients, [user("hello")], 400, ignore_eos=True).startswith(text)
        with pytest.raises(ConnectionLost):
            generation.completion  # noqa: B018
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
        await clients.engine.gate.changed()


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
        await clients.engine.gate.changed()
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


# ---- servers that cannot be talked to -----------------------------------------------------------------------------


async def test_nobody_listens():
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    async with connect(f"ws://127.0.0.1:{port}") as client:
        with pytest.raises(ConnectionLost, match=r"cannot connect to 127\.0\.0\.1:"):
            await client.generate("hello")


async def test_more_connections_than_the_server_takes(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        async with connect("ws://localhost", dial=clients.dial) as client:
            async with trio.open_nursery() as nursery:
                async with client.open_session():
                    with pytest.raises(EngineOverloaded) as refused:
                        async with client.open_session():
                            pass
                    assert (refused.value.code, refused.value.retry_after) == ("too_many_connections", 1.0)
                    await nursery.start(waiting, client)
                    await trio.sleep(3)
            assert engine.statistics().finished == 1
        await clients.all_closed()


async def waiting(client, task_status):
    task_status.started()
    completion = await client.generate("hello", GREEDY, wait=True)
    assert completion.finish_reason is FinishReason.STOP


class ScriptedServer:
    """The other end of one connection, which says what it is told to."""

    def __init__(self):
        self.ours, self.theirs = memory_stream_pair()
        self.protocol = WSConnection(ConnectionType.SERVER)

    async def dial(self):
        await trio.lowlevel.checkpoint()
        return self.ours

    async def accept(self):
        self.protocol.receive_data(await self.theirs.receive_some())
        (request,) = self.protocol.events()
        assert isinstance(request, Request)
        await self.say(AcceptConnection())
        return request

    async def tell(self, name, **fields):
        await self.say(TextMessage(json.dumps({"type": name, **fields})))

    async def say(self, event):
        await self.theirs.send_all(self.protocol.send(event))

    async def begin(self):
        await self.accept()
        await self.tell("session.created", session={"id": "sess_1"})


@pytest.fixture
async def scripted(autojump_clock):
    server = ScriptedServer()
    async with connect("ws://h:1/path", api_key="secret", dial=server.dial) as client:
        yield client, server


async def test_what_the_handshake_says(autojump_clock, scripted):
    client, server = scripted
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.open_session().__aenter__)
        request = await server.accept()
        assert (request.host, request.target) == ("h:1", "/path")
        assert (b"authorization", b"Bearer secret") in request.extra_headers
        await server.tell("session.created", session={"id": "sess_1"})


async def offend_by_eof(server):
    await server.theirs.aclose()


async def offend_by_eof_after_the_request(server):
    await server.theirs.receive_some()
    await server.theirs.aclose()


async def offend_by_no_http(server):
    await server.theirs.send_all(b"\xff\xff\xff\n\n")


async def offend_by_another_page(server):
    await server.theirs.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")


async def offend_by_silence(server):
    await trio.sleep_forever()


async def offend_by_a_goodbye(server):
    await server.accept()
    await server.say(CloseConnection(code=1008, reason="go"))


async def offend_by_another_event(server):
    await server.accept()
    await server.tell("hello")


async def offend_by_no_json(server):
    await server.accept()
    await server.say(TextMessage("hello"))


OFFENCES = [
    (offend_by_eof, "1006"),
    (offend_by_eof_after_the_request, "1006"),
    (offend_by_no_http, "does not speak WebSocket"),
    (offend_by_another_page, "HTTP status 200"),
    (offend_by_silence, f"does not answer within {CONNECT_TIMEOUT:g} s"),
    (offend_by_a_goodbye, "1008: go"),
    (offend_by_another_event, "does not begin with a session.created"),
    (offend_by_no_json, "does not begin with a session.created"),
]


@pytest.mark.parametrize(("offence", "complaint"), OFFENCES, ids=[offence.__name__ for offence, _ in OFFENCES])
async def test_what_is_no_server_of_ours(autojump_clock, scripted, offence, complaint):
    client, server = scripted
    async with trio.open_nursery() as nursery:
        nursery.start_soon(offence, server)
        with pytest.raises(ConnectionLost, match=complaint):
            async with client.open_session():
                pass
        nursery.cancel_scope.cancel()
    with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
        await server.ours.send_all(b"x")


REFUSALS = [
    (401, {"type": "invalid_request_error", "code": "invalid_api_key", "message": "no"}, RequestRejected),
    (429, {"type": "rate_limit_error", "code": "too_many", "message": "no", "retry_after": 3}, EngineOverloaded),
    (503, {"type": "server_error", "code": "shutting_down", "message": "no"}, EngineClosed),
]


@pytest.mark.parametrize(("status", "problem", "error"), REFUSALS)
async def test_a_refused_handshake_is_a_typed_error(autojump_clock, scripted, status, problem, error):
    client, server = scripted
    body = json.dumps({"error": problem}).encode()

    async def refuse():
        server.protocol.receive_data(await server.theirs.receive_some())
        list(server.protocol.events())
        headers = [(b"content-length", b"%d" % len(body))]
        await server.say(RejectConnection(status_code=status, headers=headers, has_body=True))
        await server.say(RejectData(body))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuse)
        with pytest.raises(error, match="no"):
            async with client.open_session():
                pass


async def test_a_server_that_falls_silent_is_noticed(autojump_clock, scripted):
    client, server = scripted
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.begin)
        async with client.open_session() as session:
            before = trio.current_time()
            with pytest.raises(ConnectionLost, match="does not answer"):
                async with session.generate("hello"):
                    pass
            assert trio.current_time() - before <= 2 * PING_INTERVAL


async def test_a_server_that_does_not_say_goodbye(autojump_clock, scripted):
    client, server = scripted
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.begin)
        async with client.open_session():
            before = trio.current_time()
        assert trio.current_time() - before <= CLOSE_TIMEOUT


NONSENSE = [
    TextMessage("hello"),
    TextMessage("[]"),
    TextMessage("{}"),
    TextMessage('{"type": "response.created"}'),
    BytesMessage(b"{}"),
]


@pytest.mark.parametrize("message", NONSENSE, ids=[repr(message.data) for message in NONSENSE])
async def test_what_is_no_event_ends_the_session(autojump_clock, scripted, message):
    client, server = scripted

    async def offend():
        await server.begin()
        await wait_all_tasks_blocked()
        await server.say(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(offend)
        async with client.open_session() as session:
            with pytest.raises(ConnectionLost):
                async with session.generate("hello"):
                    pass


async def test_unknown_events_are_ignored(autojump_clock, scripted):
    client, server = scripted

    async def talk():
        await server.begin()
        await server.tell("engine.state", state="awake")
        await server.tell("error", error={"code": "x", "message": "y", "event_id": None})
        await server.tell("response.output_text.delta", delta="of nothing")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        async with client.open_session() as session:
            await wait_all_tasks_blocked()
            assert (session.id, session.history, session.generation) == ("sess_1", [], None)


async def test_a_message_that_never_ends(autojump_clock, scripted, monkeypatch):
    monkeypatch.setattr("trioengine.client.websocket.MAX_MESSAGE", 100)
    assert MAX_MESSAGE > 1 << 20
    client, server = scripted

    async def talk():
        await server.begin()
        with suppress(trio.BrokenResourceError):
            while True:
                await server.say(TextMessage("x" * 60, message_finished=False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        async with client.open_session() as session:
            await session.ended()
            with pytest.raises(ConnectionLost, match="1009"):
                await session.generate("hello").__aenter__()
        nursery.cancel_scope.cancel()
