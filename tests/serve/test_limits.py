"""Each limit of ServeConfig counts: a client beyond it is refused or closed, all others are served."""

import json
import logging
import ssl
from contextlib import suppress

import pytest
import trio
from helpers.clients import CHAT, chat, open_clients, read_all, receive_late, status_and_body
from helpers.frames import HANDSHAKE, HEALTH, request
from helpers.secured import TRUSTING
from trio.testing import lockstep_stream_pair, wait_all_tasks_blocked
from trio_websocket import ConnectionClosed

from trioengine.serve.limits import size_of_json, size_of_json_text

LONG = {"temperature": 0, "max_output_tokens": 400, "ignore_eos": True}


POSTS = ["/health", CHAT, "/v1/completions", "/tokenize", "/detokenize", "/abort_request", "/update_weights"]
PAGES = ["/", "/docs", "/openapi.json", "/metrics", "/tokenizer_info", "/v1/models"]


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request):
    return request.param


def post(size, path="/health"):
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), size) + b"x" * size


async def seconds_until_closed(stream):
    before = trio.current_time()
    await read_all(stream, silence=1000)
    return trio.current_time() - before


@pytest.mark.parametrize("path", POSTS)
async def test_the_body(autojump_clock, tls, path):
    async with open_clients(max_body_size=100, tls=tls) as clients:
        assert status_and_body(await clients.http(post(100, path)))[0] in (400, 403, 405)
        status, body = status_and_body(await clients.http(post(101, path)))
        assert (status, body["error"]["message"]) == (413, "the body is larger than 100 bytes")


PREFLIGHT = "Origin: https://example.com\r\nAccess-Control-Request-Method: POST\r\n"
UNREAD = [
    ("GET", "/health", "", 200),
    ("HEAD", "/ready", "", 200),
    ("POST", "/health", "", 405),
    ("POST", "/nothing", "", 404),
    ("GET", "/v1/realtime", "", 426),
    ("OPTIONS", "/tokenize", PREFLIGHT, 200),
    *(("GET", path, "", 200) for path in PAGES),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), UNREAD)
async def test_a_body_that_nobody_reads(autojump_clock, method, path, headers, status):
    """It may be there, but it costs little: who has no key can send one, too."""

    def request(size):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n{headers}\r\n"
        return head.encode() + bytes(size)

    async with open_clients(allowed_origin="https://example.com") as clients:
        assert (await clients.http(request(64 << 10))).startswith(b"HTTP/1.1 %d " % status)
        data = await clients.http(request(1 << 20)[:-1])
        assert data.startswith(b"HTTP/1.1 413 ")
        assert (b"the body is larger than 65536 bytes" in data) == (method != "HEAD")


async def test_the_head(autojump_clock, tls):
    async with open_clients(max_header_size=1024, tls=tls) as clients:
        padding = b"X: " + b"x" * (1024 - len(HEALTH) - 5) + b"\r\n"
        head = HEALTH[:-2] + padding + b"\r\n"
        assert status_and_body(await clients.http(head))[0] == 200
        status, body = status_and_body(await clients.http(head.replace(b"X: ", b"X: x")))
        assert (status, body["error"]["message"]) == (431, "the header block is larger than 1024 bytes")


async def test_the_longest_head_of_a_websocket(autojump_clock):
    """In pieces, as it comes from a network."""
    async with open_clients(max_header_size=64 << 10) as clients:
        stream = clients.stream()
        padding = b"X: " + b"x" * ((64 << 10) - len(HANDSHAKE) - 5) + b"\r\n"
        head = HANDSHAKE[:-2] + padding + b"\r\n"
        await stream.send_all(head[:10_000])
        await wait_all_tasks_blocked()
        await stream.send_all(head[10_000:])
        assert (await read_all(stream)).startswith(b"HTTP/1.1 101 ")
        await stream.aclose()


async def test_the_message(autojump_clock):
    async with open_clients(max_message_size=1000) as clients, clients.realtime() as client:
        await client.websocket.send_message("x" * 1000)
        assert (await client.next())["error"]["code"] == "invalid_json"
        await client.websocket.send_message("€" * 333)
        assert (await client.next())["error"]["code"] == "invalid_json"
        await client.websocket.send_message("x" * 1001)
        with pytest.raises(ConnectionClosed) as closed:
            await client.next()
        assert closed.value.reason.code == 1009
        assert closed.value.reason.reason == "Exceeded maximum message size: 1000 bytes"


async def test_a_message_larger_than_what_may_be_unhandled(autojump_clock):
    """It is one message, and may be."""
    async with open_clients(max_message_size=9 << 20) as clients, clients.realtime() as client:
        await client.websocket.send_message("x" * (9 << 20))
        assert (await client.next())["error"]["code"] == "invalid_json"


async def drip(stream, data):
    """Send a byte each tenth of a second until the connection is closed; returns the seconds that it was open."""
    before = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def send():
            with suppress(trio.BrokenResourceError):
                for byte in data:
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(0.1)

        nursery.start_soon(send)
        with suppress(trio.BrokenResourceError):
            await read_all(stream, silence=1000)
        nursery.cancel_scope.cancel()
    return trio.current_time() - before


@pytest.mark.parametrize("path", ["/health", *PAGES, CHAT, "/v1/completions", "/v1/realtime"])
async def test_a_head_that_drips(autojump_clock, tls, path):
    """Its time is not that of each byte."""
    async with open_clients(handshake_timeout=2, tls=tls) as clients:
        data = HEALTH.replace(b"/health", path.encode())[:-2] + b"X: " + b"x" * 100
        assert await drip(clients.stream(), data) == pytest.approx(2, abs=0.3)


async def test_a_client_that_sends_nothing(autojump_clock, tls):
    async with open_clients(handshake_timeout=2, tls=tls) as clients:
        stream = clients.stream()
        if tls:
            await stream.do_handshake()
        assert await seconds_until_closed(stream) == pytest.approx(2)


@pytest.mark.parametrize("num_sent", [0, 1, 5, 100, None])
async def test_a_tls_handshake_that_does_not_end(autojump_clock, num_sent):
    """Some bytes of the ClientHello come, or all of it without an answer to the server's; others are served."""
    hello = ssl.MemoryBIO()
    session = TRUSTING.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    async with open_clients(handshake_timeout=2, tls=True) as clients:
        stream = clients.plain_stream()
        await stream.send_all(hello.read()[:num_sent])
        assert (await clients.request("GET", "/health")).status == 200
        assert await seconds_until_closed(stream) == pytest.approx(2, abs=0.1)


async def test_a_tls_handshake_that_drips(autojump_clock):
    hello = ssl.MemoryBIO()
    session = TRUSTING.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    async with open_clients(handshake_timeout=2, tls=True) as clients:
        assert await drip(clients.plain_stream(), hello.read()) == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_that_drips(autojump_clock, tls, path):
    async with open_clients(body_timeout=3, tls=tls) as clients:
        stream = clients.stream()
        await stream.send_all(post(100, path)[:-100])
        assert await drip(stream, b"x" * 99) == pytest.approx(3, abs=0.3)


@pytest.mark.parametrize("path", POSTS)
async def test_the_time_of_a_body(autojump_clock, tls, path):
    async with open_clients(body_timeout=3, tls=tls) as clients:
        stream = clients.stream()
        await stream.send_all(post(10, path)[:-1])
        before = trio.current_time()
        status, body = status_and_body(await read_all(stream, silence=1000))
        assert trio.current_time() - before == pytest.approx(3, abs=0.1)
        assert (status, body["error"]["code"]) == (408, "request_timeout")


async def test_between_two_requests(autojump_clock, tls):
    async with open_clients(idle_timeout=7, tls=tls) as clients:
        stream = clients.stream()
        await stream.send_all(HEALTH)
        assert await seconds_until_closed(stream) == pytest.approx(7)


async def test_pings(autojump_clock, tls):
    """A client that does not answer one is gone when the next would come."""
    async with open_clients(client_ping_interval=4, tls=tls) as clients:
        stream = clients.stream()
        await stream.send_all(HANDSHAKE)
        assert await seconds_until_closed(stream) == pytest.approx(8)


def posted(path, content):
    return request(path, "POST", body=json.dumps(content).encode())


UNREAD_ANSWERS = {
    "websocket": HANDSHAKE,
    **{path: request(path) for path in ("/health", *PAGES)},
    "/tokenize": posted("/tokenize", {"prompt": "a" * 200}),
    "/v1/completions": posted("/v1/completions", {"prompt": "a"}),
    CHAT: posted(CHAT, chat()),
}


@pytest.mark.parametrize("request_bytes", UNREAD_ANSWERS.values(), ids=UNREAD_ANSWERS)
async def test_a_client_that_reads_nothing(autojump_clock, tls, request_bytes):
    async with open_clients(send_timeout=5, client_ping_interval=100, tls=tls) as clients:
        stream = clients.stream(*lockstep_stream_pair())
        before = trio.current_time()
        await stream.send_all(request_bytes)
        if request_bytes is HANDSHAKE:
            await stream.receive_some()  # the handshake's answer; then session.created is not read
        await clients.all_closed()
        assert 5 <= trio.current_time() - before < 13  # a goodbye has its time, too


async def test_a_client_that_reads_slowly(autojump_clock, tls, caplog):
    """A long answer may take longer than the time that a client has that reads nothing."""
    caplog.set_level(logging.INFO)
    async with open_clients(send_timeout=5, tls=tls) as clients, clients.connect(*lockstep_stream_pair()) as client:
        before = trio.current_time()
        await client.send("POST", CHAT, chat(max_tokens=400, logprobs=True, top_logprobs=20))
        data = b""
        while not data.endswith(b"}}"):
            data += await receive_late(client.stream, 1 << 16, clients.server.config.send_timeout)
        assert trio.current_time() - before > 2 * clients.server.config.send_timeout
        assert data.count(b'"logprob"') == 400 * 21
    assert "does not read" not in caplog.text


async def test_a_body_in_tiny_chunks(autojump_clock, clients):
    """However many come at once, others are served between them."""
    order = []
    async with clients.connect() as client, trio.open_nursery() as nursery:
        head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.stream.send_all(head + b"2\r\nxx\r\n" * 5000 + b"0\r\n\r\n")

        async def health():
            assert (await clients.request("GET", "/health")).status == 200
            order.append("health")

        nursery.start_soon(health)
        assert status_and_body(await client.stream.receive_some())[0] == 405
        order.append("chunks")
    assert order == ["health", "chunks"]


def test_sizes_of_json():
    """A value of JSON takes its own memory, and that of its texts and of the values in it; by its text at most."""
    for text, num_values in (("null", 1), ('"ab"', 1), ("[]", 1), ("[1, 2]", 3), ('{"ab": [true]}', 4), ('"é"', 1)):
        value = json.loads(text)
        num_characters = {'"ab"': 2, '{"ab": [true]}': 2, '"é"': 4}.get(text, 0)
        assert size_of_json(value) == 64 * num_values + num_characters
        assert size_of_json(value) <= size_of_json_text(text)
