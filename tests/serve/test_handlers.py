"""Handlers of requests: what ends one before it has answered, and what a crash of one leaves alone."""

from helpers.clients import read_all, status_and_body
from helpers.doors import SlowDoor, asked, front_door
from helpers.frames import HEALTH


async def test_a_client_that_goes_cancels_its_handler(autojump_clock, clients):
    slow = SlowDoor(clients)
    async with slow.asked():
        assert not slow.was_cancelled
    assert slow.was_cancelled


async def test_too_much_ahead(autojump_clock, clients):
    slow = SlowDoor(clients)
    async with slow.asked() as stream:
        await stream.send_all(b"x" * ((64 << 10) + 1))
        assert status_and_body(await read_all(stream))[0] == 400
        assert slow.was_cancelled


async def test_a_handler_that_crashes(autojump_clock, clients, caplog):
    """What came right behind its request is answered."""

    async def broken(request):
        raise ZeroDivisionError("a secret")

    async with asked(front_door(clients, "/broken", broken), "/broken", more=HEALTH) as stream:
        data = await read_all(stream)
    assert data.startswith(b"HTTP/1.1 500 ")
    assert b"internal_error" in data
    assert b"secret" not in data
    assert b"HTTP/1.1 200 " in data
    assert "ZeroDivisionError" in caplog.text
