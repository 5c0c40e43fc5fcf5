"""Streamed responses by themselves: pieces, silences, and handlers that do not keep to the rules."""

import logging
import socket

import pytest
import trio
from helpers.clients import HttpClient, receive_late
from helpers.doors import connection_handler
from trio.testing import lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from trioengine.serve.body import CHUNK, KEEP_ALIVE, Body, Disconnected, Sender
from trioengine.serve.errors import ClientError
from trioengine.serve.http import StreamingResponse, json_response

LONG = bytes(range(256)) * 50_000


@pytest.fixture
def connect(clients):
    """A function that gives a client of a server with one more route, which is answered by `write`."""
    nursery = clients._nursery

    def connect(write, *pair, **options):
        async def handler(request):
            return StreamingResponse(write, **options)

        ours, theirs = pair or memory_stream_pair()
        nursery.start_soon(connection_handler(clients, "/stream", handler).handle, theirs)
        return HttpClient(ours)

    return connect


async def test_pieces_come_as_they_are_sent(autojump_clock, connect):
    async def write(body):
        for piece in (b"a", b"bc", b"def" * 10_000):
            await body.send(piece)
            await trio.sleep(1)

    client = connect(write, content_type=b"text/plain", status=202, headers=((b"x-one", b"1"),))
    await client.send("GET", "/stream")
    status, headers = await client.head()
    assert (status, headers["content-type"], headers["x-one"]) == (202, "text/plain", "1")
    before = trio.current_time()
    assert [await client.piece(), await client.piece()] == [b"a", b"bc"]
    assert trio.current_time() - before == pytest.approx(1)
    assert await client.rest() == b"def" * 10_000
    assert (await client.request("GET", "/health")).status == 200
    await client.stream.aclose()


async def test_a_whole_response_instead(autojump_clock, connect):
    async def write(body):
        return json_response(200, {"a": 1})

    client = connect(write)
    assert (await client.request("GET", "/stream")).json == {"a": 1}
    assert (await client.request("GET", "/health")).status == 200
    await client.stream.aclose()


async def test_an_error_before_the_first_piece(autojump_clock, connect):
    async def write(body):
        raise ClientError("no_such_thing", "there is none", param="x")

    client = connect(write)
    answer = await client.request("GET", "/stream")
    assert (answer.status, answer.error["code"]) == (400, "no_such_thing")
    assert (await client.request("GET", "/health")).status == 200
    await client.stream.aclose()


async def test_no_comment_comes_within_a_whole_response(autojump_clock, connect, caplog):
    """Its client reads it only when a stream would long have said that it goes on."""

    async def write(body):
        await trio.sleep(KEEP_ALIVE - 1)
        raise ClientError("no_such_thing", "there is none", param="x")

    client = connect(write, *lockstep_stream_pair(), keep_alive=b".")
    await client.send("GET", "/stream")
    await trio.sleep(KEEP_ALIVE + 5)
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (400, "no_such_thing")
    assert not caplog.records
    await trio.aclose_forcefully(client.stream)


async def raise_after_a_piece(body):
    await body.send(b"a")
    raise ZeroDivisionError


async def respond_after_a_piece(body):
    await body.send(b"a")
    return json_response(200, {})


@pytest.mark.parametrize("write", [raise_after_a_piece, respond_after_a_piece])
async def test_an_error_after_it_cuts_the_body_off(autojump_clock, connect, caplog, write):
    """The client can tell: the end of the body is missing."""
    client = connect(write)
    await client.send("GET", "/stream")
    await client.head()
    assert await client.piece() == b"a"
    assert await client.stream.receive_some() == b""
    assert len(caplog.records) == (write is raise_after_a_piece)
    caplog.clear()
    await client.stream.aclose()


async def test_nothing_at_all(autojump_clock, connect):
    async def write(body):
        return None

    client = connect(write)
    await client.send("GET", "/stream")
    assert await client.stream.receive_some() == b""
    await client.stream.aclose()


async def test_only_a_silence_is_broken(autojump_clock, connect):
    async def write(body):
        for _ in range(4):
            await body.send(b"a")
            await trio.sleep(KEEP_ALIVE - 1)
        await trio.sleep(2)
        await body.send(b"z")

    client = connect(write, keep_alive=b".")
    assert (await client.request("GET", "/stream")).body == b"aaaa.z"
    await client.stream.aclose()


async def test_no_comment_comes_after_the_last_piece(autojump_clock, connect):
    """The handler may take long to end: a worker that is stuck has to release the session."""

    async def write(body):
        await body.send(b"a")
        await body.send(b"z", is_last=True)
        await trio.sleep(2 * KEEP_ALIVE)

    client = connect(write, keep_alive=b".")
    assert (await client.request("GET", "/stream")).body == b"az"
    await client.stream.aclose()


@pytest.mark.parametrize("last", [b"z", b""])
async def test_what_follows_waits_for_the_comment_before_it(autojump_clock, connect, last):
    """A piece, or the end."""

    async def write(body):
        await body.send(b"a")
        await trio.sleep(KEEP_ALIVE + 1)
        if last:
            await body.send(last)

    client = connect(write, *lockstep_stream_pair(), keep_alive=b".")
    await client.send("GET", "/stream")
    await client.head()
    assert await client.piece() == b"a"
    await trio.sleep(KEEP_ALIVE + 5)
    assert await client.rest() == b"." + last
    await trio.aclose_forcefully(client.stream)


async def test_a_long_piece_that_is_read_slowly(autojump_clock, clients, connect):
    """Its client has the time that it has to read nothing again and again."""

    async def write(body):
        await body.send(b"x" * (1 << 20))
        await body.send(b"y" * (1 << 20))

    client = connect(write, *lockstep_stream_pair())
    await client.send("GET", "/stream")
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += await receive_late(client.stream, CHUNK, clients.server.config.send_timeout)
    assert data.count(b"x" * (1 << 20)) == data.count(b"y" * (1 << 20)) == 1
    await trio.aclose_forcefully(client.stream)


class BrokenSends(trio.abc.SendStream):
    async def send_all(self, data):
        raise trio.BrokenResourceError

    async def wait_send_all_might_not_block(self):
        await trio.lowlevel.checkpoint()

    async def aclose(self):
        await trio.lowlevel.checkpoint()


async def test_a_send_that_fails_is_a_departure(autojump_clock, connect, caplog):
    caplog.set_level(logging.INFO, "trioengine")
    departed = trio.Event()

    async def write(body):
        body.on_disconnect = departed.set
        await body.send(b"a")

    ours, theirs = memory_stream_pair()
    client = connect(write, ours, trio.StapledStream(BrokenSends(), theirs.receive_stream))
    await client.send("GET", "/stream")
    await departed.wait()
    await wait_all_tasks_blocked()
    assert caplog.messages[1:] == ["client disconnected: it closed the connection"]  # after the line of the access log
    await client.stream.aclose()


async def test_who_answers_is_told_of_a_departure_first(autojump_clock, connect):
    told, log = trio.Event(), []

    async def write(body):
        body.on_disconnect = lambda: log.append("disconnected")
        try:
            await body.send(b"a")
            await trio.sleep_forever()
        except trio.Cancelled:
            log.append("cancelled")
            raise
        finally:
            told.set()

    client = connect(write)
    await client.send("GET", "/stream")
    await client.head()
    await client.stream.aclose()
    await told.wait()
    assert log == ["disconnected", "cancelled"]


# ---- pieces that are sent without waiting ----------------------------------------------------------------------------


@pytest.fixture
async def streaming():
    """A body that has begun, on a socket with little room, and the client's end."""
    ours, theirs = trio.socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    async with trio.SocketStream(ours) as server, trio.SocketStream(theirs) as client, trio.open_nursery() as nursery:
        body = Body(Sender(server), nursery, send_timeout=10.0)
        body.start(bytes, bytes, b".")
        assert not body.can_send_now  # its head is another's to send
        await body.send(b"first ")
        yield body, client
        nursery.cancel_scope.cancel()


async def test_a_piece_is_sent_at_once(streaming):
    body, client = streaming
    assert body.can_send_now
    with trio.testing.assert_no_checkpoints():
        body.send_now(b"second ")
        body.send_now(b"third")
    assert await client.receive_some() == b"first second third"


async def test_what_does_not_fit_follows_before_all_else(streaming):
    """Nothing is sent at once while a piece is on its way, or another task is to send the next one."""
    body, client = streaming
    body.send_now(LONG)
    could_send = []

    class Look(trio.abc.Instrument):
        def before_task_step(self, task):
            could_send.append(body.can_send_now)

    async def send_behind():
        await body.send(b"behind")
        trio.lowlevel.remove_instrument(look)

    trio.lowlevel.add_instrument(look := Look())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_behind)
        received = bytearray()
        while not received.endswith(b"behind"):
            received += await client.receive_some()
    assert received == b"first " + LONG + b"behind"
    assert set(could_send) == {False}
    assert body.can_send_now


async def test_a_client_that_does_not_read_the_rest_is_gone(autojump_clock):
    ours, theirs = trio.socket.socketpair()
    with theirs:
        async with trio.SocketStream(ours) as server, trio.open_nursery() as nursery:
            body = Body(Sender(server), nursery, send_timeout=10.0)
            body.start(bytes, bytes, b".")
            await body.send(b"first")
            body.send_now(LONG)
            nursery.start_soon(body.watch)
    assert nursery.cancel_scope.cancel_called
    assert str(body.disconnected) == "it does not read"
    assert not body.can_send_now


async def test_a_client_that_closes_before_the_rest_is_gone():
    ours, theirs = trio.socket.socketpair()
    disconnects = []
    async with trio.SocketStream(ours) as server, trio.open_nursery() as nursery:
        body = Body(Sender(server), nursery, send_timeout=10.0)
        body.start(bytes, bytes, b"")
        body.on_disconnect = lambda: disconnects.append("told")
        await body.send(b"first")
        body.send_now(LONG)
        theirs.close()
    assert nursery.cancel_scope.cancel_called
    assert disconnects == ["told"]
    assert str(body.disconnected) == "it closed the connection"


async def test_a_client_that_is_gone_is_told_nothing_more():
    """Not even why it is: an answer that is aborted for its sake has an error to tell."""
    ours, theirs = trio.socket.socketpair()
    async with trio.SocketStream(theirs) as client:
        async with trio.SocketStream(ours) as server, trio.open_nursery() as nursery:
            body = Body(Sender(server), nursery, send_timeout=10.0)
            body.start(bytes, bytes, b"")
            await body.send(b"first")
            body.disconnect(Disconnected("it closed the connection"))
            await body.send(b"second")
        assert await client.receive_some() == b"first"
        assert await client.receive_some() == b""


async def test_what_is_sent_at_once_is_no_silence(autojump_clock):
    """Nothing keeps a stream alive that lives."""
    ours, theirs = trio.socket.socketpair()
    async with trio.SocketStream(theirs) as client, trio.SocketStream(ours) as server, trio.open_nursery() as nursery:
        body = Body(Sender(server), nursery, send_timeout=60.0)
        body.start(bytes, bytes, b".")
        await body.send(b"0")
        nursery.start_soon(body.watch)
        for number in range(1, 6):
            await trio.sleep(KEEP_ALIVE * 0.6)
            body.send_now(b"%d" % number)
        await trio.sleep(KEEP_ALIVE * 1.2)
        assert await client.receive_some() == b"012345."
        nursery.cancel_scope.cancel()
