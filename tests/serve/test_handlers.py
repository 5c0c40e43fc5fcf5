"""Handlers of requests: what ends one before it has answered, and what a crash of one leaves alone."""

import pytest
import trio
from clients import read_all, status_and_body
from doors import asked, front_door
from frames import request


@pytest.fixture
def log():
    return []


@pytest.fixture
def slow(clients, log):
    """A front door with a route whose handler never ends."""

    async def handler(request):
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            log.append("cancelled")
            raise

    return front_door(clients, "/slow", handler)


async def test_a_client_that_goes_cancels_its_handler(autojump_clock, slow, log):
    async with asked(slow, "/slow"):
        assert log == []
    assert log == ["cancelled"]


async def test_too_much_ahead(autojump_clock, slow, log):
    async with asked(slow, "/slow") as stream:
        await stream.send_all(b"x" * ((64 << 10) + 1))
        assert status_and_body(await read_all(stream))[0] == 400
        assert log == ["cancelled"]


async def test_a_handler_that_crashes(autojump_clock, clients, caplog):
    async def broken(request):
        raise ZeroDivisionError("a secret")

    async with asked(front_door(clients, "/broken", broken), "/broken") as stream:
        await stream.send_all(request("/health"))
        data = await read_all(stream)
    assert data.startswith(b"HTTP/1.1 500 ")
    assert b"internal_error" in data
    assert b"secret" not in data
    assert b"HTTP/1.1 200 " in data
    assert "ZeroDivisionError" in caplog.text
