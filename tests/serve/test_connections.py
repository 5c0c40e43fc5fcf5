"""WebSocket connections that are refused, or are not: too many, from elsewhere, by a malformed handshake."""

import pytest
import trio
from helpers.clients import Clients, status_and_body
from helpers.frames import HANDSHAKE, HEALTH, event, read_until, request
from trio.testing import wait_all_tasks_blocked

from trioengine.serve.connection import BEYOND_TIMEOUT, LINGER_TIMEOUT, MAX_BEYOND
from trioengine.serve.limits import RESERVE, clamp_to_fd_limit
from trioengine.testing import simulated_engine

VERSION = request("/version")


async def test_more_connections_than_the_server_takes(autojump_clock):
    """The one too many is refused, but for a probe; when another has gone, there is room."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=2)
        async with clients.realtime() as client:
            async with clients.realtime():
                for asked in (VERSION, HANDSHAKE, b"", request("/nothing"), request("/v1/models", "PUT")):
                    answer = await clients.http(asked, silence=BEYOND_TIMEOUT + 1)
                    status, body = status_and_body(answer)
                    assert (status, body["error"]["code"]) == (503, "too_many_connections")
                    assert b"retry-after: 1\r\n" in answer
                for probe in (HEALTH, request("/ready"), request("/is_sleeping")):
                    answer = await clients.http(probe + HEALTH)
                    assert status_and_body(answer[: answer.rindex(b"}") + 1])[0] == 200
                    assert b"connection: close" in answer
                    assert answer.count(b"HTTP/1.1 200 ") == 1
            assert (await client.ask("hello", temperature=0))["status"] == "completed"
            assert status_and_body(await clients.http(VERSION))[0] == 200
        clients.server.connections.close_idle()


async def test_more_connections_than_the_server_refuses(autojump_clock):
    """Those beyond the limit are looked at, a few at a time; those that are refused make room for the next."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        async with clients.realtime():
            refused = [clients.stream() for _ in range(MAX_BEYOND)]
            for stream in refused:
                await stream.send_all(VERSION)
            await wait_all_tasks_blocked()
            connection_handler = clients.server.connections
            assert connection_handler._beyond.left == 0
            assert status_and_body(await clients.http(VERSION))[0] == 503
            for stream in refused:
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 503 ")
            await trio.sleep(LINGER_TIMEOUT + 1)  # simulated: what was refused is let go then
            assert connection_handler._beyond.left == MAX_BEYOND
        clients.server.connections.close_idle()


async def test_a_bad_request_makes_room_until_it_is_closed(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, max_connections=1)
        bad = clients.stream()
        await bad.send_all(b"nonsense\r\n\r\n")
        assert (await bad.receive_some()).startswith(b"HTTP/1.1 400 ")
        assert clients.server.connections._slots.left == 0
        assert status_and_body(await clients.http(VERSION))[0] == 200
        assert await bad.receive_some() == b""
        await bad.aclose()
        assert status_and_body(await clients.http(HEALTH))[0] == 200
        clients.server.connections.close_idle()


async def test_no_more_connections_than_descriptors(autojump_clock, descriptors, caplog):
    """Some are left for the worker; with enough of them the number is the configured one."""
    descriptors(RESERVE + 2)
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        assert f"at most 2 connections: the process may have {RESERVE + 2} descriptors" in caplog.text
        async with clients.realtime(), clients.realtime():
            status, body = status_and_body(await clients.http(VERSION))
            assert (status, body["error"]["message"]) == (503, "connection limit reached (2)")
    assert clamp_to_fd_limit(3) == 2
    assert clamp_to_fd_limit(2) == 2
    descriptors(RESERVE - 1)
    assert clamp_to_fd_limit(3) == 1


REFUSED = [
    (b"/v1/realtime?model=other", b"", 404, "model_not_found"),
    (b"/v1/realtime?resumed=10", b"", 400, "unsupported_parameter"),
    (b"/v1/nothing", b"", 404, "not_found"),
    (b"/v1/realtime", b"Origin: https://example.com\r\n", 403, "forbidden"),
    (b"/v1/realtime", b"Origin: null\r\n", 403, "forbidden"),
    (b"/v1/realtime", b"Sec-WebSocket-Protocol: a,,;\xff\r\n", 400, "bad_request"),
    (b"/v1/realtime", b"Sec-WebSocket-Extensions: \xff\r\n", 400, "bad_request"),
    (b"/v1/realtime", b"Connection: \xff\r\n", 400, "bad_request"),
]


@pytest.mark.parametrize(("path", "header", "status", "code"), REFUSED)
async def test_a_handshake_that_is_refused(autojump_clock, clients, path, header, status, code):
    handshake = HANDSHAKE.replace(b"/v1/realtime", path).replace(b"Upgrade: ", header + b"Upgrade: ", 1)
    answered, body = status_and_body(await clients.http(handshake))
    assert (answered, body["error"]["code"]) == (status, code)


BODIES = [
    HANDSHAKE[:-2] + b"Content-Length: 5\r\n\r\nhello",
    HANDSHAKE[:-2] + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\n",
    HANDSHAKE[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0"),
]


@pytest.mark.parametrize("handshake", BODIES, ids=range(len(BODIES)))
async def test_a_handshake_with_a_body_or_of_another_time(autojump_clock, clients, handshake):
    """What follows its head would be frames to us, and something else to who stands in between."""
    status, body = status_and_body(await clients.http(handshake))
    assert (status, body["error"]["code"]) == (400, "bad_request")


async def test_a_handshake_with_an_empty_body(autojump_clock, clients):
    assert b"session.created" in await clients.http(HANDSHAKE[:-2] + b"Content-Length: 0\r\n\r\n")


@pytest.mark.parametrize("origin", [b"http://localhost:3000", b"http://127.0.0.1", b"http://[::1]:8000"])
async def test_pages_of_this_machine_may_connect(autojump_clock, clients, origin):
    async with clients.realtime(extra_headers=[(b"Origin", origin)]) as client:
        assert client.websocket.closed is None


async def test_half_a_handshake(autojump_clock, clients):
    for missing in (b"Sec-WebSocket-Key", b"Sec-WebSocket-Version", b"Connection"):
        lines = [line for line in HANDSHAKE.split(b"\r\n") if not line.startswith(missing)]
        assert (await clients.http(b"\r\n".join(lines))).startswith(b"HTTP/1.1 426 ")


async def test_a_handshake_right_behind_a_request(autojump_clock, clients):
    """They came in the same bytes: h11 has read the handshake's head, too, and trio-websocket still gets all of it."""
    stream = clients.stream()
    await stream.send_all(HEALTH + HANDSHAKE)
    data = await read_until(stream, b"session.created")
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 101 " in data
    await stream.send_all(event("response.cancel"))
    await read_until(stream, b"response_cancel_not_active")
    await stream.aclose()
