"""HTTP clients that go before they have their answer are counted, once; others are not."""

import logging

import pytest
import trio
from clients import read_all
from trio.testing import memory_stream_pair

from trioengine.serve import ServeConfig
from trioengine.serve.access import Access
from trioengine.serve.departures import Departures
from trioengine.serve.front_door import FrontDoor
from trioengine.serve.http import json_response
from trioengine.serve.routes import Route


def slow_door(clients, departures):
    async def slow(request):
        await trio.sleep(10)  # longer than one client has patience for, shorter than the other
        return json_response(200, {})

    door = clients.server.front_door
    routes = {"/slow": Route({"GET": slow})}
    config = ServeConfig(insecure=True)
    access, limits = Access(config), config.limits
    upgrade, realtime = door._check_upgrade, door._realtime
    return FrontDoor(routes, access, upgrade, realtime, departures=departures, limits=limits, max_connections=8)


@pytest.mark.parametrize(("patience", "count"), [(1, 1), (20, 0)])
async def test_an_http_client_that_goes_before_its_answer_is_counted(autojump_clock, clients, patience, count):
    departures = Departures()
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_door(clients, departures).handle, theirs)
        await ours.send_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        with trio.move_on_after(patience):
            await ours.receive_some()
        await ours.aclose()
    assert departures.count == count


async def test_an_http_client_that_does_not_take_its_answer_is_counted(autojump_clock, clients, caplog):
    caplog.set_level(logging.INFO, "trioengine")
    departures = Departures()
    ours, theirs = memory_stream_pair()
    theirs.send_stream.send_all_hook = trio.sleep_forever
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_door(clients, departures).handle, theirs)
        await ours.send_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await read_all(ours, silence=100)
    assert departures.count == 1
