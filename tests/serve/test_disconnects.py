"""Clients that leave, stall, flood or break the rules: their session ends, and nobody else notices."""

import json
import re

import pytest
import trio
from clients import Clients, status_and_body
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed

from trioengine.core.lifecycle import Cause
from trioengine.serve.descriptors import RESERVE, affordable
from trioengine.serve.front_door import MAX_REFUSALS
from trioengine.serve.sockets import LINGER_TIMEOUT
from trioengine.testing import simulated_engine, toy_answer

LONG = {"temperature": 0, "max_output_tokens": 400, "ignore_eos": True}
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MASK = b"\0\0\0\0"


def frame(payload, opcode=1):
    """A WebSocket frame from a client; the mask changes nothing."""
    length = len(payload)
    if length < 126:
        size = bytes([0x80 | length])
    else:
        size = b"\xfe" + length.to_bytes(2) if length < 1 << 16 else b"\xff" + length.to_bytes(8)
    return bytes([0x80 | opcode]) + size + MASK + payload


def event(name, **fields):
    return frame(json.dumps({"type": name, **fields}).encode())


SAY = event(
    "conversation.item.create",
    item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
)


async def read_until(stream, text):
    data = b""
    while text not in data:
        received = await stream.receive_some()
        assert received, f"closed without {text!r}"
        data += received
    return data


async def streaming(clients, pair=memory_stream_pair):
    """A raw connection in the middle of a long response."""
    stream = clients.stream(*pair())
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(SAY + event("response.create", response=LONG))
    await read_until(stream, b"output_text.delta")
    assert clients.engine.statistics().running == 1
    return stream


async def nobody_is_left(clients):
    """At once: no timeout may have to pass for it."""
    before = trio.current_time()
    while clients.engine.statistics().sessions:
        await clients.engine.gate.changed()
    assert trio.current_time() - before < 0.1
    statistics = clients.engine.statistics()
    assert (statistics.finished, statistics.aborted, statistics.failed) == (0, 1, 0)
    await clients.engine.check_invariants()


async def test_a_client_that_is_cut_off_ends_its_session(autojump_clock, clients):
    """Both directions are closed without a word, as by a reset: the request is aborted, the session ended."""
    stream = await streaming(clients)
    await stream.aclose()
    await nobody_is_left(clients)


@pytest.mark.parametrize("response", [{}, {"conversation": "none"}], ids=["conversation", "beside"])
async def test_a_client_that_vanishes_while_its_prompt_is_prepared(autojump_clock, response):
    async with (
        simulated_engine(thread_threshold=100, thread_passes=50) as (engine, simulation),
        trio.open_nursery() as nursery,
    ):
        clients = Clients(engine, simulation, nursery)
        stream = clients.stream()
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
        await stream.send_all(SAY.replace(b"hello", b"x" * 5) * 25 + event("response.create", response=response))
        while not engine.statistics().preparing:
            await trio.lowlevel.checkpoint()
        await stream.aclose()
        while engine.statistics().sessions:
            await engine.gate.changed()
        aborted = [line for line in clients.server.metrics.render().splitlines() if b"requests_aborted_total{" in line]
        assert [line for line in aborted if not line.endswith(b" 0.0")] == [
            b'trioengine_requests_aborted_total{cause="disconnect"} 1.0'
        ]
        clients.server.front_door.close_idle()
        await clients.all_closed()


async def test_half_close_is_a_disconnect(autojump_clock, clients):
    stream = await streaming(clients)
    await stream.send_eof()
    await nobody_is_left(clients)


async def test_a_clean_close_in_the_middle_of_a_response(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        await client.until("response.output_text.delta")
        await client.websocket.aclose()
        await nobody_is_left(clients)


async def test_the_cause_is_the_disconnect(autojump_clock, clients):
    stream = await streaming(clients)
    (session,) = clients.engine._sessions
    generation = session.generation
    await stream.aclose()
    await nobody_is_left(clients)
    assert session.end_cause is Cause.DISCONNECT
    assert generation.outcome.cause is Cause.DISCONNECT


async def test_a_client_that_leaves_while_idle(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.ask("hello")
        assert clients.engine.statistics().sessions == 1
    while clients.engine.statistics().sessions:
        await clients.engine.gate.changed()


async def test_a_client_that_leaves_before_its_first_request_never_had_a_session(autojump_clock, clients):
    async with clients.realtime():
        assert clients.engine.statistics().sessions == 0


async def test_a_client_that_never_reads_is_disconnected_and_delays_nobody(autojump_clock, clients):
    """Its unread answer is merged; after 20 s of a send that does not move, the connection is closed."""
    stream = clients.stream(*lockstep_stream_pair())
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(SAY + event("response.create", response=LONG))
    before = trio.current_time()
    async with clients.realtime() as other:
        assert (await other.ask("hello", temperature=0, max_output_tokens=5))["status"] in ("completed", "incomplete")
    assert trio.current_time() - before < 1
    while clients.engine.statistics().sessions:
        await clients.engine.gate.changed()
    assert 19 < trio.current_time() - before < 30


async def test_a_slow_reader_costs_one_merged_delta(autojump_clock, clients):
    """What does not fit the outbox waits in the engine as one delta, and nothing is lost."""
    stream = clients.stream(*lockstep_stream_pair())
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(SAY + event("response.create", response=LONG))
    await trio.sleep(10)  # the whole answer is there, and nobody has read
    assert clients.engine.statistics().finished == 1
    data = await read_until(stream, b"response.done")
    deltas = re.findall(rb'"delta": "([^"]*)"', data)
    assert 1 < len(deltas) < 300
    tokenizer = clients.engine.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert b"".join(deltas).decode() == tokenizer.decode(toy_answer(prompt, 400, ignore_eos=True))
    await stream.aclose()


LARGE = event(
    "conversation.item.create",
    item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * 60_000}]},
)
HUGE = event("conversation.item.retrieve", item_id="x" * ((1 << 20) - 60))
FLOODS = [
    (event("conversation.item.retrieve", item_id="x" * 80) * 65, b"more than 64 unhandled events"),
    (HUGE * 9, b"more than 8388608 characters of unhandled events"),
]


@pytest.mark.parametrize(("flood", "reason"), FLOODS, ids=["events", "characters"])
async def test_too_much_that_is_unhandled(autojump_clock, clients, flood, reason):
    """Nothing is read of what they cause, so they pile up: the connection is closed with 1008, as a client can see."""
    stream = clients.stream(*lockstep_stream_pair())
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(LARGE + LARGE + flood)
    await wait_all_tasks_blocked()
    data = await read_until(stream, b"\x88")
    while reason not in data:
        data += await stream.receive_some()
    assert (1008).to_bytes(2) + reason in data
    await stream.aclose()


async def test_many_events_that_are_read_are_fine(autojump_clock, clients):
    async with clients.realtime() as client, trio.open_nursery() as nursery:

        async def send():
            for _ in range(300):
                await client.send("session.update", session={"instructions": "x"})

        nursery.start_soon(send)
        for _ in range(300):
            assert (await client.next())["type"] == "session.updated"


async def test_a_message_that_is_too_large(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.websocket.send_message("x" * ((1 << 20) + 1))
        with pytest.raises(ConnectionClosed) as closed:
            await client.next()
        assert closed.value.reason.code == 1009


async def test_a_message_of_one_mebibyte(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.websocket.send_message("x" * (1 << 20))
        assert (await client.next())["error"]["code"] == "invalid_json"


async def test_garbage_instead_of_frames(autojump_clock, clients):
    stream = await streaming(clients)
    await stream.send_all(b"\xff" * 100)
    await nobody_is_left(clients)


async def test_a_client_that_does_not_answer_pings(autojump_clock, clients):
    """It reads all, says nothing: after two ping intervals it is taken for gone."""
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    before = trio.current_time()
    with trio.fail_after(100):
        while await stream.receive_some():
            pass
    assert 39 < trio.current_time() - before < 50


async def test_a_bug_in_one_connection_stays_there(autojump_clock, clients, monkeypatch, caplog):
    async with clients.realtime() as other:
        with monkeypatch.context() as patch:
            patch.setattr("trioengine.serve.realtime.connection.chat_messages", lambda items, instructions: 1 / 0)
            async with clients.realtime() as client:
                await client.say("hello")
                await client.send("response.create")
                error = (await client.until("error"))["error"]
                assert (error["type"], error["code"]) == ("server_error", "internal_error")
                assert "division" not in error["message"]
        assert "ZeroDivisionError" in caplog.text
        assert (await other.ask("hello", temperature=0))["status"] == "completed"


async def test_more_connections_than_the_server_takes(autojump_clock):
    """The one too many is told so, whatever it asks for; when another has gone, there is room."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=2)
        health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        async with clients.realtime() as client:
            idle = clients.stream()
            await idle.send_all(health)
            assert (await idle.receive_some()).startswith(b"HTTP/1.1 200 ")
            for asked in (health, HANDSHAKE, b""):
                answer = await clients.http(asked)
                status, body = status_and_body(answer)
                assert (status, body["error"]["code"]) == (503, "too_many_connections")
                assert b"retry-after: 1\r\n" in answer
            await idle.aclose()
            assert (await client.ask("hello", temperature=0))["status"] == "completed"
            assert status_and_body(await clients.http(health))[0] == 200
        clients.server.front_door.close_idle()


async def test_more_connections_than_the_server_refuses(autojump_clock):
    """Whoever is refused keeps a descriptor until it reads that: of these there is a limit, too."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        served = clients.stream()
        await wait_all_tasks_blocked()
        refused = [clients.stream() for _ in range(MAX_REFUSALS)]
        await wait_all_tasks_blocked()
        assert await clients.stream().receive_some() == b""
        for stream in refused:
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 503 ")
        await trio.sleep(LINGER_TIMEOUT + 1)
        assert status_and_body(await clients.http(b""))[0] == 503
        await served.aclose()


async def test_a_bad_request_has_its_place_until_it_is_closed(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        bad = clients.stream()
        await bad.send_all(b"nonsense\r\n\r\n")
        assert (await bad.receive_some()).startswith(b"HTTP/1.1 400 ")
        assert status_and_body(await clients.http(b""))[0] == 503
        await bad.aclose()
        await wait_all_tasks_blocked()
        assert status_and_body(await clients.http(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 200
        clients.server.front_door.close_idle()


async def test_no_more_connections_than_descriptors(autojump_clock, descriptors, caplog):
    """Some are left for the worker; with enough of them the number is the configured one."""
    descriptors(RESERVE + 2)
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        assert f"at most 2 connections: the process may have {RESERVE + 2} descriptors" in caplog.text
        idle = [clients.stream() for _ in range(2)]
        await wait_all_tasks_blocked()
        status, body = status_and_body(await clients.http(b""))
        assert (status, "has 2 connections" in body["error"]["message"]) == (503, True)
        for stream in idle:
            await stream.aclose()
    assert affordable(3) == 2
    assert affordable(2) == 2
    descriptors(RESERVE - 1)
    assert affordable(3) == 1


REFUSED = [
    (b"/v1/realtime?model=other", b"", 404, "model_not_found"),
    (b"/v1/realtime?resume=10", b"", 400, "unsupported_parameter"),
    (b"/v1/nothing", b"", 404, "not_found"),
    (b"/v1/realtime", b"Origin: https://example.com\r\n", 403, "forbidden"),
    (b"/v1/realtime", b"Origin: null\r\n", 403, "forbidden"),
    (b"/v1/realtime", b"Sec-WebSocket-Protocol: a,,;\xff\r\n", 400, "bad_request"),
    (b"/v1/realtime", b"Sec-WebSocket-Extensions: \xff\r\n", 400, "bad_request"),
    (b"/v1/realtime", b"Connection: \xff\r\n", 400, "bad_request"),
]


@pytest.mark.parametrize(("path", "header", "status", "code"), REFUSED)
async def test_a_handshake_that_is_refused(autojump_clock, clients, path, header, status, code):
    handshake = HANDSHAKE.replace(b"/v1/realtime", path).replace(b"Upgrade: ", header + b"Upgrade: ", 1)
    answered, body = status_and_body(await clients.http(handshake))
    assert (answered, body["error"]["code"]) == (status, code)


BODIES = [
    HANDSHAKE[:-2] + b"Content-Length: 5\r\n\r\nhello",
    HANDSHAKE[:-2] + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    HANDSHAKE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0"),
]


@pytest.mark.parametrize("handshake", BODIES, ids=range(len(BODIES)))
async def test_a_handshake_with_a_body_or_of_another_time(autojump_clock, clients, handshake):
    """What follows its head would be frames to us, and something else to who stands in between."""
    status, body = status_and_body(await clients.http(handshake))
    assert (status, body["error"]["code"]) == (400, "bad_request")


async def test_a_handshake_with_an_empty_body(autojump_clock, clients):
    assert b"session.created" in await clients.http(HANDSHAKE[:-2] + b"Content-Length: 0\r\n\r\n")


@pytest.mark.parametrize("origin", [b"http://localhost:3000", b"http://127.0.0.1", b"http://[::1]:8000"])
async def test_pages_of_this_machine_may_connect(autojump_clock, clients, origin):
    async with clients.realtime(extra_headers=[(b"Origin", origin)]) as client:
        assert client.websocket.closed is None


async def test_half_a_handshake(autojump_clock, clients):
    for missing in (b"Sec-WebSocket-Key", b"Sec-WebSocket-Version", b"Connection"):
        lines = [line for line in HANDSHAKE.split(b"\r\n") if not line.startswith(missing)]
        assert (await clients.http(b"\r\n".join(lines))).startswith(b"HTTP/1.1 426 ")


async def test_a_handshake_right_behind_a_request(autojump_clock, clients):
    """They came in the same bytes: h11 has read the handshake's head, too, and trio-websocket still gets all of it."""
    stream = clients.stream()
    await stream.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HANDSHAKE)
    data = await read_until(stream, b"session.created")
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 101 " in data
    await stream.send_all(event("response.cancel"))
    await read_until(stream, b"response_cancel_not_active")
    await stream.aclose()
