"""trioengine.connect and other servers: each has an error message of its own, and no call waits forever."""

import json
import math
from contextlib import nullcontext, suppress

import pytest
import trio
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

from trioengine import ConnectionLost, EngineAsleep, EngineClosed, EngineOverloaded, RequestRejected, TimedOut, connect
from trioengine.aio.websocket import MAX_MESSAGE
from trioengine.client.connection import CLOSE_TIMEOUT, CONNECT_TIMEOUT, PING_INTERVAL


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
    (offend_by_eof, "^h:1 does not answer as trioengine does: it closed the connection$"),
    (offend_by_eof_after_the_request, "^h:1 does not answer as trioengine does: it closed the connection$"),
    (offend_by_no_http, "^h:1 does not answer as trioengine does: the server does not speak WebSocket"),
    (offend_by_another_page, "^h:1 does not answer as trioengine does: HTTP status 200$"),
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


async def test_a_timeout_that_passes_before_the_server_answers(autojump_clock, scripted):
    client, _ = scripted
    before = trio.current_time()
    with pytest.raises(TimedOut, match="timed out after 5 s while waiting: h:1 does not answer") as caught:
        await client.generate("hello", timeout=5)
    assert caught.value.completion.text == ""
    assert trio.current_time() - before == pytest.approx(5)


REFUSALS = [
    (401, {"type": "invalid_request_error", "code": "invalid_api_key", "message": "no"}, RequestRejected),
    (429, {"type": "rate_limit_error", "code": "too_many", "message": "no", "retry_after": 3}, EngineOverloaded),
    (503, {"type": "server_error", "code": "overloaded", "message": "no"}, EngineOverloaded),
    (503, {"type": "server_error", "code": "asleep", "message": "no", "retry_after": 3}, EngineAsleep),
    (503, {"type": "server_error", "code": "shutting_down", "message": "no"}, EngineClosed),
    *[  # no times to wait
        (503, {"type": "server_error", "code": "overloaded", "message": "no", "retry_after": hint}, EngineOverloaded)
        for hint in (0, -1, math.nan, math.inf, "soon", None, [3])
    ],
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
        with pytest.raises(error, match="no") as refused:
            async with client.open_session(wait=False):
                pass
        if error in (EngineOverloaded, EngineAsleep):
            assert refused.value.retry_after == (3 if problem.get("retry_after") == 3 else 1)


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


@pytest.mark.parametrize("answers", [0, 1])
async def test_a_server_that_goes_before_it_has_the_history(autojump_clock, scripted, answers):
    client, server = scripted

    async def talk():
        await server.begin()
        await wait_all_tasks_blocked()
        for index in range(answers):
            await server.tell("conversation.item.done", item={"id": f"item_{index + 1}"})
        await server.theirs.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        with pytest.raises(ConnectionLost):
            async with client.open_session(history=[{"role": "user", "content": "a"}] * 2):
                pass


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
    TextMessage('{"type": "engine.state"}'),
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


@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError, OSError])
@pytest.mark.parametrize("reads", [True, False])
async def test_what_on_state_raises_comes_out_as_it_is(autojump_clock, kind, reads):
    server, error = ScriptedServer(), kind("ours")

    def on_state(state):
        assert state == "sleeping"
        raise error

    async def talk():
        await server.begin()
        await wait_all_tasks_blocked()
        await server.tell("engine.state", state="sleeping")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        with pytest.raises(kind) as raised:
            async with connect("ws://h:1", dial=server.dial, on_state=on_state) as client:
                async with client.open_session() as session, session.generate("hello") if reads else nullcontext():
                    await trio.sleep_forever()
    assert raised.value is error


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
            assert (session.id, session.history) == ("sess_1", [])


async def test_a_message_that_the_server_cannot_read_ends_the_session(autojump_clock, scripted):
    """It may be the one that asked for the answer, and its id was not read either."""
    client, server = scripted

    async def talk():
        await server.begin()
        await wait_all_tasks_blocked()
        problem = {"type": "invalid_request_error", "code": "invalid_event", "message": "y", "event_id": None}
        await server.tell("error", error=problem)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        async with client.open_session() as session:
            for _ in range(2):
                with pytest.raises(ConnectionLost, match=r"^the server cannot read a message: y$"):
                    await session.ask("hello")


@pytest.mark.parametrize(("arguments", "is_whole"), [('{"at": {"a": "}"}}', True), ('{"at": {"a": "}"}', False)])
async def test_leaving_at_the_end_of_a_call_keeps_it(autojump_clock, scripted, arguments, is_whole):
    """The server has sent all of its arguments, and not that the item is done."""
    client, server = scripted

    async def talk():
        await server.begin()
        await wait_all_tasks_blocked()
        await server.tell("response.created", response={"id": "resp_1"})
        call = {"id": "item_c", "type": "function_call", "call_id": "call_1", "name": "clock"}
        await server.tell("response.output_item.added", item=call)
        await server.tell("response.function_call_arguments.delta", item_id="item_c", delta=arguments)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        async with client.open_session() as session:
            request = session.generate("hello", tools=[{"name": "clock"}], keep_partial=True, timeout=30)
            async with request as generation:
                async for chunk in generation:
                    if any(delta.arguments for delta in chunk.tool_calls):
                        break
            calls = [call.to_json() for call in generation.completion.tool_calls]
            called = {"role": "assistant", "content": "", "tool_calls": calls}
            kept = [{"role": "user", "content": "hello"}, called]
            assert [call["function"]["arguments"] for call in calls] == ([arguments] if is_whole else [])
            assert session.history == (kept if is_whole else [])


async def test_a_message_that_never_ends(autojump_clock, scripted, monkeypatch):
    monkeypatch.setattr("trioengine.aio.websocket.MAX_MESSAGE", 100)
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
