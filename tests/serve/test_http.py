"""The HTTP routes and the limits of the front door."""

import dataclasses
import gzip
import json
import logging

import h11
import pytest
import trio
from helpers.clients import CHAT, Clients, chat, read_all, status_and_body
from helpers.frames import HANDSHAKE, request
from hypothesis import example, given
from hypothesis import strategies as st
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from trioengine import EngineConfig, __version__
from trioengine.core.lifecycle import PowerEvent
from trioengine.serve import ids
from trioengine.serve.config import ServeConfig
from trioengine.serve.http import header_lines, json_response
from trioengine.serve.listening import is_loopback
from trioengine.serve.server import Server
from trioengine.testing import simulated_engine

ROUTES = [
    ("/health", 200, {"status": "ok"}),
    ("/ready", 200, {"state": "awake"}),
    ("/version", 200, {"version": __version__}),
]


@pytest.mark.parametrize(("path", "status", "body"), ROUTES)
async def test_routes(autojump_clock, clients, path, status, body):
    assert status_and_body(await clients.http(request(path))) == (status, body)
    assert status_and_body(await clients.http(request(path + "?"))) == (status, body)


async def test_home_is_plain_text(autojump_clock, clients):
    data = await clients.http(request("/"))
    assert b"content-type: text/plain" in data.lower()
    assert b"/v1/realtime" in data


async def test_what_is_not_there(autojump_clock, clients):
    status, body = status_and_body(await clients.http(request("/v1/nothing", "POST", body=b"{}")))
    assert status == 404
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"


async def test_a_method_that_is_not_allowed(autojump_clock, clients):
    data = await clients.http(request("/health", "POST"))
    assert status_and_body(data)[0] == 405
    assert b"allow: GET, HEAD" in data


async def test_head_has_no_body(autojump_clock, clients):
    data = await clients.http(request("/health", "HEAD"))
    assert data.startswith(b"HTTP/1.1 200 ")
    assert data.endswith(b"\r\n\r\n")


HEADS = [
    (request("/health", "HEAD", host="example.com"), 403),
    (request("/v1/realtime", "HEAD", more="Connection: close\r\n"), 426),
    (request("/v1/realtime", "HEAD", more="Upgrade: websocket\r\nConnection: upgrade\r\n"), 426),
    (request("/health", "HEAD", more="X: " + "x" * (32 << 10) + "\r\n"), 431),
    (request("/health", "HEAD", body=b"x" * ((4 << 20) + 1)), 413),
]


@pytest.mark.parametrize(("data", "status"), HEADS, ids=range(len(HEADS)))
async def test_a_head_that_is_refused_has_no_body_either(autojump_clock, clients, caplog, data, status):
    answer = await clients.http(data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in answer.lower()
    assert answer.endswith(b"\r\n\r\n")
    assert len(caplog.records) == (status == 403)  # its warning, and no crash


async def test_the_websocket_route_without_an_upgrade(autojump_clock, clients):
    data = await clients.http(request("/v1/realtime"))
    assert status_and_body(data)[0] == 426
    assert b"upgrade: websocket" in data


async def test_requests_on_one_connection(autojump_clock, clients):
    data = await clients.http(request("/health") + request("/nothing") + request("/ready"))
    assert data.count(b"HTTP/1.1 ") == 3
    assert data.count(b"HTTP/1.1 200 ") == 2


async def test_a_worker_that_hangs_is_no_health(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8, unresponsive_timeout=4.0, ping_interval=1.0)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        stream = clients.stream()

        async def health():
            await stream.send_all(request("/health"))
            return status_and_body(await read_all(stream, 0.1))

        await trio.sleep(5 * config.ping_interval)
        assert await health() == (200, {"status": "ok"})
        simulation.worker.hang()
        await trio.sleep(config.ping_interval + config.unresponsive_timeout / 2)
        assert await health() == (503, {"status": "unresponsive"})
        assert b"retry-after: 1\r\n" in await clients.http(request("/health", "HEAD"))
        await engine.runtime.gate.changed()
        await engine.ready()
        assert await health() == (200, {"status": "ok"})
        nursery.cancel_scope.cancel()


async def test_ready_follows_the_engine(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=8, restart_delays=(1.0,))
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        stream = clients.stream()

        async def ready():
            await stream.send_all(request("/ready"))
            return status_and_body(await read_all(stream, 0.1))

        assert await ready() == (200, {"state": "awake"})
        simulation.worker.exit(-9)
        await engine.runtime.gate.changed()
        assert await ready() == (503, {"state": "restarting"})
        assert b"retry-after: 1\r\n" in await clients.http(request("/ready"))
        await engine.ready()
        assert await ready() == (200, {"state": "awake"})
        engine.runtime.gate.change_power(PowerEvent.DRAIN)
        assert await ready() == (503, {"state": "draining"})
        assert status_and_body(await clients.http(request("/health"))) == (200, {"status": "ok"})
        engine.runtime.gate.change_power(PowerEvent.CLOSE)
        assert await ready() == (503, {"state": "closed"})
        assert status_and_body(await clients.http(request("/health")))[0] == 503
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("host", ["example.com", "example.com:8000", "localhost.example.com", "192.168.0.1", "[::2]"])
async def test_a_host_that_is_not_this_machine(autojump_clock, clients, host):
    status, body = status_and_body(await clients.http(request("/health", host=host)))
    assert (status, body["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.8.0.1", "[::1]:8000"])
async def test_a_host_that_is_this_machine(autojump_clock, clients, host):
    assert status_and_body(await clients.http(request("/health", host=host)))[0] == 200


async def test_no_host_at_all(autojump_clock, clients):
    assert status_and_body(await clients.http(b"GET /health HTTP/1.0\r\n\r\n"))[0] == 403


def test_loopback():
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("")


async def test_insecure_serves_every_host(autojump_clock):
    async with simulated_engine() as (engine, _), trio.open_nursery() as nursery:
        ours, theirs = memory_stream_pair()
        nursery.start_soon(Server(engine, ServeConfig(insecure=True)).connections.handle, theirs)
        await ours.send_all(request("/health", host="example.com"))
        assert status_and_body(await read_all(ours))[0] == 200
        await ours.aclose()


CHUNKED = "Transfer-Encoding: chunked\r\n"
LIMITS = [
    (request("/tokenize", "POST", more=CHUNKED, body=b"0\r\n\r\n") + request("/version"), 400),
    (request("/tokenize", "POST", more=CHUNKED, body=b"0\r\n\r\n").replace(b"POST", b"GET"), 400),
    (b"POST /tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (request("/health", more="X: " + "x" * (33 << 10) + "\r\n"), 431),
    (b"GET /" + b"x" * (100 << 10), 431),
    (b"\0\1\2\3\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (request("/health", "POST", body=b"x" * ((4 << 20) + 1)), 413),
    (request("http://[/", "GET"), 400),
]


@pytest.mark.parametrize(("data", "status"), LIMITS, ids=range(len(LIMITS)))
async def test_limits_are_answered_and_the_connection_is_closed(autojump_clock, clients, data, status):
    stream = clients.stream()
    await stream.send_all(data)
    answer = b""
    while received := await stream.receive_some():
        answer += received
    answered, body = status_and_body(answer)
    assert answered == status
    assert body["error"]["type"] == "invalid_request_error"
    assert b"connection: close" in answer.lower()


async def test_a_body_of_four_mebibytes_is_read(autojump_clock, clients):
    status, body = status_and_body(await clients.http(request("/tokenize", "POST", body=b"x" * (4 << 20))))
    assert (status, body["error"]["code"]) == (400, "invalid_json")


async def test_expect_100_continue(autojump_clock, clients):
    stream = clients.stream()
    await stream.send_all(request("/health", "POST", more="Content-Length: 2\r\nExpect: 100-continue\r\n"))
    assert (await read_all(stream)).startswith(b"HTTP/1.1 100 ")
    await stream.send_all(b"{}")
    assert status_and_body(await read_all(stream))[0] == 405
    await stream.aclose()


async def test_a_head_that_does_not_come(autojump_clock, clients):
    stream = clients.stream()
    before = trio.current_time()
    await stream.send_all(b"GET /health HTTP/1.1\r\n")
    assert await stream.receive_some() == b""
    assert trio.current_time() - before == pytest.approx(10)


async def test_nothing_at_all(autojump_clock, clients):
    stream = clients.stream()
    before = trio.current_time()
    assert await stream.receive_some() == b""
    assert trio.current_time() - before == pytest.approx(10)


async def test_an_idle_connection(autojump_clock, clients):
    stream = clients.stream()
    await stream.send_all(request("/health"))
    await read_all(stream, 0.1)
    before = trio.current_time()
    assert await stream.receive_some() == b""
    assert 299 < trio.current_time() - before < 301


async def test_a_client_that_goes_in_the_middle_of_a_head(autojump_clock, clients):
    stream = clients.stream()
    await stream.send_all(b"GET /hea")
    await stream.send_eof()
    assert await stream.receive_some() == b""


async def test_a_client_that_has_its_answer_may_close(autojump_clock, clients, caplog):
    """In the very moment in which it is sent: nothing was cut off, and nothing is logged."""
    caplog.set_level(logging.INFO, "trioengine")
    ours, theirs = memory_stream_pair()
    pump = theirs.send_stream.send_all_hook

    async def close():
        await pump()
        await wait_all_tasks_blocked()
        ours.send_stream.close()

    theirs.send_stream.send_all_hook = close
    clients.stream(ours, theirs)
    await ours.send_all(request("/version"))
    assert status_and_body(await read_all(ours))[0] == 200
    await clients.all_closed()
    assert [record.name for record in caplog.records] == ["trioengine.access"]


class ResetStream(trio.abc.ReceiveStream):
    """These bytes, then a reset."""

    def __init__(self, data):
        self.data = [data] if data else []

    async def receive_some(self, max_bytes=None):
        await trio.lowlevel.checkpoint()
        if not self.data:
            raise trio.BrokenResourceError("reset")
        return self.data.pop()

    async def aclose(self):
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("sent", "logged"), [(b"", []), (b"GET /hea", ["client disconnected: it closed the connection"])]
)
async def test_a_reset_is_logged_where_a_request_is_cut_off(autojump_clock, clients, caplog, sent, logged):
    caplog.set_level(logging.INFO, "trioengine")
    ours, theirs = memory_stream_pair()
    clients.stream(ours, trio.StapledStream(theirs.send_stream, ResetStream(sent)))
    await clients.all_closed()
    assert caplog.messages == logged


def test_responses_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        json_response(200, {}).status = 1


# ---- encodings and the date ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", CHAT, "/v1/completions", "/abort_request", "/docs"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip", "x" * 100])
async def test_an_encoded_body_is_refused(autojump_clock, clients, encoding, path):
    """A bomb too: it is not decoded."""
    more = f"Content-Encoding: {encoding}\r\n"
    data = await clients.http(request(path, "POST", more=more, body=gzip.compress(bytes(10 << 20))))
    status, body = status_and_body(data)
    assert (status, body["error"]["code"]) == (415, "unsupported_encoding")
    shown = f"the Content-Encoding {encoding[:40]!r} is not supported: send the body as it is"
    assert body["error"]["message"] == f"a body with {shown}"
    assert b"accept-encoding: identity\r\n" in data
    assert b"connection: close\r\n" in data.lower()


@pytest.mark.parametrize(
    "more", ["Content-Encoding: identity\r\n", "Content-Encoding:\r\n", "Accept-Encoding: gzip\r\n"]
)
async def test_a_body_that_is_not_encoded(autojump_clock, clients, more):
    data = await clients.http(request("/tokenize", "POST", more=more, body=b'{"prompt": "a"}'))
    assert status_and_body(data)[0] == 200


async def test_an_encoding_without_a_body(autojump_clock, clients):
    data = await clients.http(request("/health", more="Content-Encoding: gzip\r\n"))
    assert status_and_body(data)[0] == 200


async def test_every_response_has_a_date(autojump_clock, clients, monkeypatch):
    monkeypatch.setattr(ids, "_clock", lambda: 784111777.9)
    date = b"\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n"
    body = json.dumps(chat(stream=True)).encode()
    unreadable = b"GET /health HTTP/1.1\n\n"
    for data in (request("/health"), request("/x"), request(CHAT, "POST", body=body), HANDSHAKE, unreadable):
        head, _, _ = (await clients.http(data)).partition(b"\r\n\r\n")
        assert (head.lower() + b"\r\n").count(date.lower()) == 1, head


# ---- the headers of a response ------------------------------------------------------------------------------------

FIELD_BYTES = st.binary(max_size=3) | st.lists(st.sampled_from(b"ax-: \t\r\n\0\1\x80"), max_size=8).map(bytes)


@given(st.lists(st.tuples(FIELD_BYTES, FIELD_BYTES), max_size=3))
@example([(b"a: a", b"x")])
@example([(b"a", b"\1\x1f \t\x7f\xff")])
def test_a_client_reads_the_headers_that_were_rendered(headers):
    try:
        lines = header_lines(headers)
    except ValueError:
        with pytest.raises(ValueError, match="not allowed"):  # one of them alone is refused as well
            for header in headers:
                header_lines([header])
        return
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    client.receive_data(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n")
    assert client.next_event().headers == headers


@given(FIELD_BYTES, FIELD_BYTES)
def test_headers_that_h11_would_send_are_rendered(name, value):
    name = name.lower()
    try:
        h11.Response(status_code=200, headers=[(name, value)])
    except h11.LocalProtocolError:
        with pytest.raises(ValueError, match="not allowed"):
            header_lines([(name, value)])
    else:
        assert header_lines([(name, value)]) == name + b": " + value + b"\r\n"


@pytest.mark.parametrize(
    "header", [(b"a", b"b\r\nc: d"), (b"a\r\nb", b"c"), (b"", b"a"), (b"a", b" b"), (b"a b", b"c")]
)
def test_a_header_that_would_become_another_is_refused(header):
    with pytest.raises(ValueError, match="not allowed"):
        header_lines([header])
