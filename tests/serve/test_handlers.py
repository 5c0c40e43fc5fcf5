"""Handlers of requests: a disconnect that ends one, how it is counted, and a crash that leaves the others alone."""

import logging

import trio
from helpers.clients import read_all, status_and_body
from helpers.doors import SlowDoor, asked, connection_handler
from helpers.frames import HEALTH
from trio.testing import memory_stream_pair


async def test_a_disconnect_cancels_the_handler_and_is_counted(autojump_clock, clients):
    slow = SlowDoor(clients)
    async with slow.asked():
        assert not slow.was_cancelled
    assert slow.was_cancelled
    assert slow.disconnects.count == 1


async def test_a_disconnect_after_the_response_is_not_counted(autojump_clock, clients):
    slow = SlowDoor(clients)
    async with slow.asked() as stream:
        slow.may_answer.set()
        assert (await read_all(stream)).startswith(b"HTTP/1.1 200 ")
    assert slow.disconnects.count == 0


async def test_a_client_that_does_not_take_its_response_is_counted(autojump_clock, clients, caplog):
    caplog.set_level(logging.INFO, "trioengine")
    slow = SlowDoor(clients)
    ours, theirs = memory_stream_pair()
    theirs.send_stream.send_all_hook = trio.sleep_forever
    async with slow.asked(ours, theirs) as stream:
        slow.may_answer.set()
        await read_all(stream, silence=100)
    assert slow.disconnects.count == 1


async def test_too_much_ahead(autojump_clock, clients):
    slow = SlowDoor(clients)
    async with slow.asked() as stream:
        await stream.send_all(b"x" * ((64 << 10) + 1))
        assert status_and_body(await read_all(stream))[0] == 400
        assert slow.was_cancelled


async def test_a_handler_that_crashes(autojump_clock, clients, caplog):
    """A request pipelined behind it is answered."""

    async def broken(request):
        raise ZeroDivisionError("a secret")

    async with asked(connection_handler(clients, "/broken", broken), "/broken", more=HEALTH) as stream:
        data = await read_all(stream)
    assert data.startswith(b"HTTP/1.1 500 ")
    assert b"internal_error" in data
    assert b"secret" not in data
    assert b"HTTP/1.1 200 " in data
    assert "ZeroDivisionError" in caplog.text
