"""The line of the log for a client that leaves: one wording, over HTTP and WebSocket, whatever was in progress."""

import logging

import pytest
import trio
from helpers.clients import CHAT, chat
from helpers.frames import HANDSHAKE, read_until
from trio.testing import wait_all_tasks_blocked

CLOSED = "client disconnected: it closed the connection"
SLOW = "client disconnected: it did not read, send or answer in time"


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "trioengine")
    caplog.clear()
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "trioengine" and not record.getMessage().startswith("ready")
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_http(autojump_clock, clients, messages, stream):
    async with clients.connect() as client:
        await client.send("POST", CHAT, chat(stream=stream, max_tokens=400, ignore_eos=True))
        await wait_all_tasks_blocked()
    await clients.all_closed()
    assert messages() == [CLOSED]


@pytest.mark.parametrize("how", ["close frame", "reset"])
async def test_websocket(autojump_clock, clients, messages, how):
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    if how == "close frame":
        await stream.send_all(b"\x88\x80\0\0\0\0")
    await stream.aclose()
    await clients.all_closed()
    assert messages() == [CLOSED]


@pytest.mark.parametrize("what", ["no ping is answered", "the head does not come"])
async def test_too_slow(autojump_clock, clients, messages, what):
    stream = clients.stream()
    if what == "the head does not come":
        await stream.send_all(b"GET /")
    else:
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
    await clients.all_closed()
    assert messages() == [SLOW]
    await trio.aclose_forcefully(stream)


async def test_broken_frames(autojump_clock, clients, messages):
    """What the client sent is not quoted."""
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    await stream.send_all(b"\xff\xff")
    await stream.aclose()
    await clients.all_closed()
    (message,) = messages()
    assert message.startswith("client disconnected: it ")
