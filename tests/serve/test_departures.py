"""HTTP clients that go before they have their answer are counted, once; others are not."""

import logging

import trio
from helpers.clients import read_all
from helpers.doors import SlowDoor
from trio.testing import memory_stream_pair


async def test_an_http_client_that_goes_before_its_answer_is_counted(autojump_clock, clients):
    slow = SlowDoor(clients)
    async with slow.asked():
        pass
    assert slow.disconnects.count == 1


async def test_an_http_client_that_has_its_answer_is_not_counted(autojump_clock, clients):
    slow = SlowDoor(clients)
    async with slow.asked() as stream:
        slow.may_answer.set()
        assert (await read_all(stream)).startswith(b"HTTP/1.1 200 ")
    assert slow.disconnects.count == 0


async def test_an_http_client_that_does_not_take_its_answer_is_counted(autojump_clock, clients, caplog):
    caplog.set_level(logging.INFO, "trioengine")
    slow = SlowDoor(clients)
    ours, theirs = memory_stream_pair()
    theirs.send_stream.send_all_hook = trio.sleep_forever
    async with slow.asked(ours, theirs) as stream:
        slow.may_answer.set()
        await read_all(stream, silence=100)
    assert slow.disconnects.count == 1
