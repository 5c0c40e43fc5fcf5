"""Requests that another HTTP parser in front of the server may read differently, or that come from elsewhere."""

import logging
import re

import pytest
from helpers.clients import open_clients, read_all, status_and_body
from helpers.frames import HANDSHAKE, HEALTH
from helpers.loopback import on_loopback
from trio.testing import memory_stream_pair

from trioengine.core.lifecycle import PowerEvent
from trioengine.serve.startup import MIN_KEY_LENGTH

STATUS = re.compile(rb"HTTP/1\.1 \d{3} ")
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def head(target="/health", *lines, version="1.1", host="localhost"):
    return "\r\n".join([f"GET {target} HTTP/{version}", f"Host: {host}", *lines, "", ""]).encode()


def post(*lines, body=b""):
    return "\r\n".join(["POST /health HTTP/1.1", "Host: localhost", *lines, "", ""]).encode() + body


TARGETS = [
    ("/health#x", "fragment"),
    ("/health?a=1#x", "fragment"),
    ("http://evil/health", "Host"),
    ("http://evil@localhost/health", "Host"),
    ("http://localhost:81/health", "Host"),
    ("http://localhost/health#x", "fragment"),
    ("http:/health", "path"),
    ("ftp://localhost/health", "path"),
    ("health", "path"),
    ("*", "path"),
    ("localhost:80", "path"),
]


@pytest.mark.parametrize(("target", "reason"), TARGETS)
async def test_a_target_that_is_refused(autojump_clock, target, reason):
    async with open_clients() as clients:
        status, body = status_and_body(await clients.http(head(target)))
        assert (status, body["error"]["code"]) == (400, "bad_request")
        assert reason in body["error"]["message"]


@pytest.mark.parametrize("target", ["//health", "//x/health", "http://localhost//health", "//"])
async def test_a_path_of_two_slashes_has_no_authority(autojump_clock, target):
    async with open_clients() as clients:
        status, body = status_and_body(await clients.http(head(target)))
        assert (status, body["error"]["code"]) == (404, "not_found")
        assert body["error"]["message"].startswith(f"no route '{target.removeprefix('http://localhost')}'")


@pytest.mark.parametrize("method", ["OPTIONS *", "CONNECT localhost:80"])
async def test_other_forms_of_a_target(autojump_clock, method):
    async with open_clients() as clients:
        request = f"{method} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        assert (await clients.http(request)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("target", ["http://localhost/health", "HTTP://LOCALHOST/health?"])
async def test_a_target_that_is_served(autojump_clock, target):
    async with open_clients() as clients:
        assert (await clients.http(head(target))).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("target", ["HTTP://LOCALHOST/health?x=//y", "/health?x=http://y"])
async def test_a_query_that_looks_like_a_target(autojump_clock, target):
    """It is read as the query of /health, which has no parameter x."""
    async with open_clients() as clients:
        assert b"unknown parameter 'x'" in await clients.http(head(target))


async def test_an_absolute_target_without_a_path(autojump_clock):
    async with open_clients() as clients:
        assert b"/v1/realtime" in await clients.http(head("http://localhost?"))


HEADS = [
    (HEALTH.replace(b"\r\n", b"\n"), "line feed"),
    (HEALTH.replace(b"Host", b"X: y\nHost"), "line feed"),
    (HEALTH.replace(b"\r\n\r\n", b"\r\n\n"), "line feed"),
    (head("/health", "X: a", " b"), "folded"),
    (head("/health", "X: a", "\tb"), "folded"),
    (head("/health", "X: a", " Transfer-Encoding: chunked"), "folded"),
    (head(version="2.0"), "HTTP/1.0 or HTTP/1.1"),
    (head(version="0.9"), "HTTP/1.0 or HTTP/1.1"),
    (head(version="1.2"), "HTTP/1.0 or HTTP/1.1"),
    (head("/health", "Host: localhost"), "more than one Host"),
    (head("/health", "Host: evil"), "more than one Host"),
    (b"GET /health HTTP/1.1\r\n\r\n", "no Host"),
    (head("/health", "Origin: http://localhost", "Origin: http://localhost"), "more than one Origin"),
    (HANDSHAKE.replace(b"Upgrade: ", b"Sec-WebSocket-Key: BBBBBBBBBBBBBBBBBBBBBB==\r\nUpgrade: ", 1), "WebSocket-Key"),
    (post("Content-Length: 1", "Content-Length: 2"), "Content-Length"),
    (post("Content-Length: 1, 2"), "Content-Length"),
    (post("Content-Length: +1"), "Content-Length"),
    (post("Content-Length: 1", "Transfer-Encoding: chunked"), "length"),
    (b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP/1.1 request"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "the bytes are TLS"),
    (head("/health", "X : a"), "HTTP/1.1 request"),
    (head("/health", "X: a\rHost: evil"), "HTTP/1.1 request"),
    (head("/health", "X: a\x00"), "HTTP/1.1 request"),
]


@pytest.mark.parametrize(("data", "reason"), HEADS, ids=range(len(HEADS)))
async def test_a_head_that_is_refused(autojump_clock, data, reason):
    """Nothing behind it is read as a request."""
    async with open_clients() as clients:
        answer = await clients.http(data + HEALTH)
        status, body = status_and_body(answer)
        assert (status, body["error"]["code"]) == (400, "bad_request")
        assert reason in body["error"]["message"]
        assert len(STATUS.findall(answer)) == 1


@pytest.mark.parametrize("value", ["gzip", "chunked, chunked", "identity"])
async def test_an_unknown_transfer_encoding(autojump_clock, value):
    async with open_clients() as clients:
        answer = await clients.http(post(f"Transfer-Encoding: {value}") + HEALTH)
        assert answer.startswith(b"HTTP/1.1 501 ") and b"the Transfer-Encoding must be chunked" in answer
        assert len(STATUS.findall(answer)) == 1


async def test_a_second_transfer_encoding(autojump_clock):
    async with open_clients() as clients:
        answer = await clients.http(post("Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + HEALTH)
        assert (
            answer.startswith(b"HTTP/1.1 501 ") and b"the request has more than one Transfer-Encoding header" in answer
        )
        assert len(STATUS.findall(answer)) == 1


TRAILERS = [b"0\r\n\n", b"0\r\nX: y\n\n", b"0\r\nX: y\r\n\n"]


@pytest.mark.parametrize("end", TRAILERS)
async def test_a_body_whose_end_has_a_bare_line_feed(autojump_clock, end):
    """Another parser may look for the end further on, and take the next request for a part of this one."""
    async with open_clients() as clients:
        answer = await clients.http(post("Transfer-Encoding: chunked") + b"1\r\nx\r\n" + end + HEALTH)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert len(STATUS.findall(answer)) == 1


@pytest.mark.parametrize("end", [b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0;x=y\r\n\r\n"])
async def test_a_chunked_body_that_ends_well(autojump_clock, end):
    async with open_clients() as clients:
        stream = clients.stream()
        for byte in post("Transfer-Encoding: chunked") + b"1\r\nx\r\n" + end:
            await stream.send_all(bytes([byte]))
        await stream.send_all(HEALTH)
        answer = await read_all(stream)
        assert answer.startswith(b"HTTP/1.1 405 ")
        assert b"HTTP/1.1 200 " in answer
        await stream.aclose()


HOSTS = ["user@localhost", "localhost/x", "localhost?x", "localhost#x", "localhost:port", "[::1", "::1", "local host"]


@pytest.mark.parametrize("options", [{}, {"insecure": True}], ids=["loopback", "insecure"])
@pytest.mark.parametrize("host", HOSTS)
async def test_a_malformed_host(autojump_clock, host, options):
    async with open_clients(**options) as clients:
        status, body = status_and_body(await clients.http(head(host=host)))
        assert (status, body["error"]["code"]) == (400, "bad_request")
        assert "Host" in body["error"]["message"]


ORIGINS = ["ftp://localhost", "localhost", "http://user@localhost", "http://localhost/", "http://", "javascript://x"]


@pytest.mark.parametrize("options", [{}, {"insecure": True}], ids=["loopback", "insecure"])
@pytest.mark.parametrize("origin", ORIGINS)
async def test_a_malformed_origin(autojump_clock, origin, options):
    async with open_clients(**options) as clients:
        status, body = status_and_body(await clients.http(head("/health", f"Origin: {origin}")))
        assert (status, body["error"]["code"]) == (400, "bad_request")
        assert "Origin" in body["error"]["message"]


async def test_an_origin_of_another_scheme_may_be_allowed(autojump_clock):
    origin = "chrome-extension://abc"
    async with open_clients(allowed_origin=origin) as clients:
        assert (await clients.http(head("/health", f"Origin: {origin}"))).startswith(b"HTTP/1.1 200 ")


REFUSED_ORIGINS = [
    ("https://example.com", "--allowed-origin https://example.com"),
    ("https://EXAMPLE.com:8443", "--allowed-origin https://example.com:8443"),
    ("ftp://localhost", "--allowed-origin ftp://localhost"),
    ("null", "no --allowed-origin can name it"),
    ("https://x/\x1b[31m", "no --allowed-origin can name it"),
    ("https://x;reboot", "no --allowed-origin can name it"),
    ("https://" + "x" * 1000, "no --allowed-origin can name it"),
]


@pytest.mark.parametrize(("origin", "remedy"), REFUSED_ORIGINS)
async def test_a_refused_origin_is_in_the_log_with_the_flag(autojump_clock, caplog, origin, remedy):
    async with open_clients() as clients:
        assert (await clients.http(head("/health", f"Origin: {origin}"))).startswith(b"HTTP/1.1 40")
    (record,) = (record for record in caplog.records if "Origin" in record.getMessage())
    assert record.levelno == logging.WARNING
    assert remedy in record.getMessage()
    assert "\x1b" not in record.getMessage()
    assert len(record.getMessage()) < 200


# ---- chunks ---------------------------------------------------------------------------------------------------------


async def test_a_million_chunks_of_a_byte(autojump_clock):
    """Their payload would be allowed; they are refused long before they have all been read."""
    async with open_clients() as clients:
        ours, theirs = memory_stream_pair()
        stream = clients.stream(ours, theirs)
        await stream.send_all(TOKENIZE + b"1\r\nx\r\n" * 1_000_000)
        answer = await stream.receive_some()
        status, body = status_and_body(answer)
        assert (status, body["error"]["code"]) == (400, "chunks_too_small")
        assert len(theirs.receive_stream._incoming._data) > 5_000_000
        await stream.aclose()


async def test_long_extensions_of_chunks(autojump_clock):
    async with open_clients() as clients:
        data = await clients.http(TOKENIZE + (b"1;" + b"x" * 10_000 + b"\r\nx\r\n") * 100)
        assert status_and_body(data)[1]["error"]["code"] == "chunks_too_small"


async def test_a_body_in_small_chunks(autojump_clock):
    """As libraries send it that write JSON value by value."""
    async with open_clients() as clients:
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "' + b"x" * 5000 + b'"}') + b"0\r\n\r\n"
        code = status_and_body(await clients.http(TOKENIZE + body))[1]["error"]["code"]
        assert code == "context_length_exceeded"


# ---- keys and the log -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["api_key", "admin_key"])
async def test_a_short_key_is_warned_about(caplog, field):
    short, long = "k" * (MIN_KEY_LENGTH - 1), "l" * MIN_KEY_LENGTH
    async with on_loopback(**{field: (long, short)}):
        (message,) = (record.getMessage() for record in caplog.records if "characters" in record.getMessage())
    assert "--" + field.replace("_", "-") in message
    assert short not in message


async def test_a_long_key_is_fine(caplog):
    async with on_loopback(api_key="k" * MIN_KEY_LENGTH):
        assert "characters" not in caplog.text


PROBES = [("/health", "DEBUG"), ("/ready", "DEBUG"), ("/version", "INFO")]


@pytest.mark.parametrize(("path", "level"), PROBES)
async def test_probes_are_logged_at_debug(autojump_clock, caplog, path, level):
    """Also those that are answered with 503."""
    caplog.set_level(logging.DEBUG, "trioengine.access")
    async with open_clients() as clients:
        await clients.http(head(path))
        clients.engine.runtime.gate.change_power(PowerEvent.DRAIN)
        await clients.http(head(path))
        await clients.http(head(path, "Origin: null"))
    levels = [record.levelname for record in caplog.records if record.name == "trioengine.access"]
    assert levels == [level, level, "INFO"]
