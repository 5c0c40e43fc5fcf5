"""Handlers of requests: what ends one before it has answered, and what a crash of one leaves alone."""

import trio
from clients import read_all, status_and_body
from frames import request
from trio.testing import memory_stream_pair

from trioengine.serve import ServeConfig, Server
from trioengine.serve.access import Access
from trioengine.serve.departures import Departures
from trioengine.serve.front_door import FrontDoor
from trioengine.serve.routes import Route


def slow_door(engine, log):
    """A front door with one more route, whose handler never ends."""

    async def slow(request):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            log.append("cancelled")
            raise

    async def broken(request):
        raise ZeroDivisionError("a secret")

    door = Server(engine).front_door
    routes = {**door._routes, "/slow": Route({"GET": slow}), "/broken": Route({"GET": broken})}
    config = ServeConfig()
    access, limits = Access(config), config.limits
    upgrade, realtime, departures = door._check_upgrade, door._realtime, Departures()
    return FrontDoor(routes, access, upgrade, realtime, departures=departures, limits=limits, max_connections=8)


async def test_a_client_that_goes_cancels_its_handler(autojump_clock, clients):
    log = []
    stream, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_door(clients.engine, log).handle, theirs)
        await stream.send_all(request("/slow"))
        await trio.sleep(1)
        await stream.aclose()
    assert log == ["cancelled"]


async def test_too_much_ahead(autojump_clock, clients):
    log = []
    stream, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_door(clients.engine, log).handle, theirs)
        await stream.send_all(request("/slow"))
        await trio.sleep(1)
        await stream.send_all(b"x" * ((64 << 10) + 1))
        assert status_and_body(await read_all(stream))[0] == 400
        assert log == ["cancelled"]
        await stream.aclose()


async def test_a_handler_that_crashes(autojump_clock, clients, caplog):
    stream, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow_door(clients.engine, []).handle, theirs)
        await stream.send_all(request("/broken") + request("/health"))
        data = await read_all(stream)
        await stream.aclose()
    assert data.startswith(b"HTTP/1.1 500 ")
    assert b"internal_error" in data
    assert b"secret" not in data
    assert b"HTTP/1.1 200 " in data
    assert "ZeroDivisionError" in caplog.text
