"""WebSocket frames by hand: fragments and control frames as the protocol has them, and as it forbids them."""

import ast
import inspect
import json
import logging
import pathlib
import textwrap
import tracemalloc

import pytest
import trio
from helpers.clients import held, open_clients, read_all, receive_late
from helpers.frames import HANDSHAKE, MASK, event, frame, read_until
from trio.testing import lockstep_stream_pair, memory_stream_pair
from trio_websocket import WebSocketConnection
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection

from trioengine.serve import websocket
from trioengine.serve.websocket import AcceptedWebSocket, WebSocketProtocol

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
TRIO_WEBSOCKET_NAMES = (
    "_get_request",
    "_handle_message_event",
    "_max_message_size",
    "_reader_task",
    "_send",
    "_send_channel",
)
CANCEL = json.dumps({"type": "response.cancel"}).encode()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request):
    return request.param


def part(payload, opcode=0, first=0):
    """A frame that is not the last one of its message; `first` has other bits of its first byte."""
    return bytes([first | opcode]) + frame(payload)[1:]


def close(code, reason=b""):
    return frame(code.to_bytes(2) + reason, CLOSE)


async def opened(clients):
    """A raw connection whose session.created was read."""
    stream = clients.stream()
    await stream.send_all(HANDSHAKE)
    await read_until(stream, b"session.created")
    return stream


async def answer(clients, data):
    """All that the server says to these frames."""
    stream = await opened(clients)
    await stream.send_all(data)
    received = await read_all(stream)
    await stream.aclose()
    return received


LAWFUL = [
    frame(CANCEL),
    part(CANCEL[:5], TEXT) + part(CANCEL[5:9]) + frame(CANCEL[9:], 0),
    part(b"", TEXT) + part(b"") * 100 + frame(CANCEL, 0),
    part(CANCEL[:5], TEXT) + frame(b"x" * 125, PING) + frame(b"", PONG) + frame(CANCEL[5:], 0),
    frame(b"never asked for", PONG) + frame(CANCEL),
    part(b'{"type": "response.cancel", "event_id": "\xc3', TEXT) + frame(b'\xa4"}', 0),
]


@pytest.mark.parametrize("data", LAWFUL, ids=range(len(LAWFUL)))
async def test_lawful_frames(autojump_clock, clients, data):
    assert b"response_cancel_not_active" in await answer(clients, data)


async def test_a_ping_within_a_message_is_answered_at_once(autojump_clock, clients):
    assert await answer(clients, part(b"{", TEXT) + frame(b"hello", PING)) == bytes([0x80 | PONG, 5]) + b"hello"


BROKEN = (1002, b"the frames break the rules of RFC 6455")
NOT_TEXT = (1007, b"a text message is not UTF-8")
UNLAWFUL = [
    (b"\x81\x02{}", *BROKEN),  # without a mask
    (part(CANCEL, TEXT, 0x80 | 0x40), *BROKEN),  # compressed, which was never agreed upon
    (part(CANCEL, TEXT, 0x80 | 0x10), *BROKEN),
    (frame(b"", 3), *BROKEN),
    (frame(b"", 11), *BROKEN),
    (frame(CANCEL, 0), *BROKEN),
    (part(b"{", TEXT) + frame(CANCEL), *BROKEN),
    (part(b"", PING), *BROKEN),
    (frame(b"x" * 126, PING), *BROKEN),
    (b"\x81\xfe\0\x02" + MASK + b"{}", *BROKEN),
    (b"\x81\xff" + (1 << 63).to_bytes(8) + MASK, *BROKEN),
    (frame(b"x", CLOSE), *BROKEN),
    (close(999), *BROKEN),
    (close(1005), *BROKEN),
    (close(5000), *BROKEN),
    (close(1000, b"\xff"), 1007, b"a text message is not UTF-8"),
    (frame(b"\xff"), *NOT_TEXT),
    (frame(b'"\xed\xa0\x80"'), *NOT_TEXT),
    (frame(b'"\xc3'), *NOT_TEXT),
]


@pytest.mark.parametrize("more", [b"", b"\xff" * 100_000])
@pytest.mark.parametrize(("data", "code", "reason"), UNLAWFUL, ids=range(len(UNLAWFUL)))
async def test_unlawful_frames_are_told_why_the_connection_ends(autojump_clock, clients, data, code, reason, more):
    assert await answer(clients, data + more) == b"\x88" + bytes([2 + len(reason)]) + code.to_bytes(2) + reason


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4999])
async def test_a_goodbye_is_answered(autojump_clock, clients, code):
    """Once, whatever follows it."""
    goodbye = b"\x88\x05" + code.to_bytes(2) + b"bye"
    assert await answer(clients, close(code, b"bye") + close(1000) + frame(CANCEL) + b"\xff" * 100) == goodbye


TOO_LARGE = [
    frame(b"x" * 1001),
    part(b"x" * 600, TEXT) + frame(b"x" * 401, 0),
    part(b"x", TEXT) + part(b"x") * 1000,
    part(b"x", BINARY) + part(b"x") * 1000,
    frame(b"x" * 1001) * 3,
    frame("€".encode() * 334),
    frame("é".encode() * 501),
    part("€".encode() * 333, TEXT) + frame(b"xx", 0),
    part("€".encode() * 333, TEXT) + frame("€".encode(), 0),
    part("é".encode(), TEXT) + part("é".encode()) * 500,
    part("€".encode() * 334, TEXT),
    frame("€".encode() * 334, BINARY),
]
AFTER = [b"", frame(b"a secret", PING), close(1000, b"a secret"), b"\xff" * 50]


@pytest.mark.parametrize("after", AFTER, ids=["nothing", "ping", "close", "garbage"])
@pytest.mark.parametrize("data", TOO_LARGE, ids=range(len(TOO_LARGE)))
async def test_a_message_that_is_too_large(autojump_clock, tls, caplog, data, after):
    """The client is told so, whatever it sends behind it; none of that is in the log."""
    caplog.set_level(logging.INFO)
    async with open_clients(max_message_size=1000, tls=tls) as clients:
        received = await answer(clients, data + after)
    assert received.startswith(b"\x88") and (1009).to_bytes(2) in received[:4]
    assert b"secret" not in received
    assert "secret" not in caplog.text and "broke the protocol" not in caplog.text


AS_LARGE_AS_MAY_BE = [
    frame("€".encode() * 333 + b"x"),
    part("€".encode() * 333, TEXT) + frame(b"x", 0),
    part("é".encode(), TEXT) + part("é".encode()) * 498 + frame("é".encode(), 0),
    part("€".encode()[:1], TEXT) + part("€".encode()[1:] + "€".encode() * 332) + frame(b"x", 0),
]


@pytest.mark.parametrize("data", AS_LARGE_AS_MAY_BE, ids=range(len(AS_LARGE_AS_MAY_BE)))
async def test_a_message_of_as_many_bytes_as_may_be(autojump_clock, tls, data):
    """Bytes of UTF-8, not characters; the message after it is counted anew."""
    async with open_clients(max_message_size=1000, tls=tls) as clients:
        stream = await opened(clients)
        for _ in range(2):
            await stream.send_all(data)
            await read_until(stream, b"invalid_json")
        await stream.aclose()


async def test_a_ping_while_the_server_says_goodbye(autojump_clock, clients, caplog):
    """It is not answered, and the goodbye comes to its end."""
    caplog.set_level(logging.INFO)
    stream = await opened(clients)
    clients.server._closing.set()
    assert b"shutting down" in await read_until(stream, b"shutting down")
    await stream.send_all(frame(b"a secret", PING) + frame(CANCEL) + close(1001))
    assert await stream.receive_some() == b""
    await stream.aclose()
    await clients.all_closed()
    assert "secret" not in caplog.text and "broke the protocol" not in caplog.text


@pytest.mark.parametrize(("opcode", "payload"), [(TEXT, b""), (BINARY, b""), (TEXT, "€".encode()), (BINARY, b"x")])
def test_fragments_cost_no_memory(opcode, payload):
    """A message may have any number of them; one of a few characters is an object of eighty bytes."""
    protocol = WebSocketProtocol(lambda: 1 << 20, held())
    protocol.receive_data(HANDSHAKE)
    (request,) = protocol.events()
    protocol.send(AcceptConnection())
    protocol.receive_data(part(b"x", opcode))
    tracemalloc.start()
    for _ in range(20):
        protocol.receive_data(part(payload) * 500)
        assert not list(protocol.events())
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 200_000
    protocol.receive_data(frame(b"", 0))
    (message,) = protocol.events()
    assert len(message.data.encode() if opcode == TEXT else message.data) == 1 + 10_000 * len(payload)
    assert request.target == "/v1/realtime"


async def test_a_flood_of_fragments_delays_nobody(autojump_clock, clients):
    """What is read at once is little."""
    stream = await opened(clients)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, part(b"", TEXT) + part(b"") * 20_000)
        assert (await clients.request("GET", "/health")).status == 200
    await stream.send_all(frame(CANCEL, 0) + event("response.cancel"))
    await read_until(stream, b"response_cancel_not_active")
    await stream.aclose()


def frames_of(data):
    """First byte and length of each frame of a server."""
    at = 0
    while at < len(data):
        first, length = data[at], data[at + 1]
        at += 2
        if length >= 126:
            size = 2 if length == 126 else 8
            length = int.from_bytes(data[at : at + size])
            at += size
        yield first, length
        at += length


async def test_a_long_message_that_is_read_slowly(autojump_clock, tls):
    """It comes in parts, each of which has its time, and with pings between them."""
    async with open_clients(send_timeout=9, client_ping_interval=15, tls=tls) as clients:
        stream = clients.stream(*lockstep_stream_pair())
        await stream.send_all(HANDSHAKE)
        await read_until(stream, b"session.created")
        text = {"type": "input_text", "text": "x" * 300_000}
        await stream.send_all(
            event("conversation.item.create", item={"type": "message", "role": "user", "content": [text]})
        )
        data = b""
        with trio.fail_after(1000):
            while data.count(b"x") < 600_000 or not data.endswith(b"}}"):
                received = await receive_late(stream, 1 << 17, clients.server.config.send_timeout)
                data += received
                if received[0] == 0x80 | PING:
                    await stream.send_all(frame(received[2:], PONG))
        frames = list(frames_of(data))
        assert [first for first, _ in frames if first != 0x80 | PING] == [TEXT, 0, 0, 0, 0x80] * 2
        assert 0x80 | PING in {first for first, _ in frames}
        await trio.aclose_forcefully(stream)


def test_the_private_names_of_trio_websocket_in_use():
    """They exist on its class, and no others are used: an update that moves one fails here."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(AcceptedWebSocket))))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    } - {"_protocol"}
    stream = memory_stream_pair()[0]
    theirs = WebSocketConnection(stream, WSConnection(ConnectionType.SERVER))
    assert used == set(TRIO_WEBSOCKET_NAMES)
    assert [name for name in TRIO_WEBSOCKET_NAMES if not hasattr(theirs, name)] == []
    package = pathlib.Path(websocket.__file__).parents[1]
    importers = [path for path in package.rglob("*.py") if "WebSocketConnection" in path.read_text()]
    assert importers == [pathlib.Path(websocket.__file__)]
