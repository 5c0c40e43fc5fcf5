"""Realtime clients that disconnect, stall, flood or violate the protocol: their session ends, others go on.

The table of test_disconnects.py has the common cases.
"""

import re

import pytest
import trio
from helpers.clients import Clients, finished
from helpers.frames import HANDSHAKE, SAY, event, read_until
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed

from trioengine.testing import simulated_engine, toy_answer

LONG = {"temperature": 0, "max_output_tokens": 400, "ignore_eos": True}


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request):
    return request.param


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
        await clients.engine.runtime.gate.changed()
    assert trio.current_time() - before < 0.1
    statistics = clients.engine.statistics()
    assert (statistics.finished, statistics.aborted, statistics.failed) == (0, 1, 0)
    await clients.engine.check_invariants()


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
            await engine.runtime.gate.changed()
        aborted = [line for line in clients.server.metrics.render().splitlines() if b"requests_aborted_total{" in line]
        assert [line for line in aborted if not line.endswith(b" 0.0")] == [
            b'trioengine_requests_aborted_total{cause="disconnect"} 1.0'
        ]
        clients.server.connections.close_idle()
        await clients.all_closed()


async def test_a_clean_close_in_the_middle_of_a_response(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create", response=LONG)
        await client.until("response.output_text.delta")
        await client.websocket.aclose()
        await nobody_is_left(clients)


async def test_a_client_that_leaves_while_idle(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.ask("hello")
        assert clients.engine.statistics().sessions == 1
    while clients.engine.statistics().sessions:
        await clients.engine.runtime.gate.changed()


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
        await clients.engine.runtime.gate.changed()
    assert 19 < trio.current_time() - before < 30


async def test_a_slow_reader_costs_one_merged_delta(autojump_clock, clients):
    """What does not fit the outbox waits in the engine as one delta, and nothing is lost."""
    stream = clients.stream(*lockstep_stream_pair())
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(SAY + event("response.create", response=LONG))
    await finished(clients.engine, 1)  # the whole answer is there, and nobody has read
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
    (HUGE * 9, b"more than 8388608 bytes of unhandled events"),
]


@pytest.mark.parametrize(("flood", "reason"), FLOODS, ids=["events", "bytes"])
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
            patch.setattr("trioengine.serve.realtime.connection.prompt_of", lambda *_: 1 / 0)
            async with clients.realtime() as client:
                await client.say("hello")
                await client.send("response.create")
                error = (await client.until("error"))["error"]
                assert (error["type"], error["code"]) == ("server_error", "internal_error")
                assert "division" not in error["message"]
        assert "ZeroDivisionError" in caplog.text
        assert (await other.ask("hello", temperature=0))["status"] == "completed"
