"""Connections that take slots and do nothing: others, probes and operators still come in."""

import math

import pytest
import trio
from helpers.clients import Clients, open_clients, read_all, status_and_body
from helpers.doors import SlowDoor
from helpers.frames import HANDSHAKE, HEALTH, frame, read_until, request
from helpers.loopback import on_loopback
from trio.testing import wait_all_tasks_blocked

from trioengine.serve.connection import BEYOND_TIMEOUT, LINGER_TIMEOUT, MAX_BEYOND
from trioengine.serve.limits import MAX_LEAVING, SHARE, ConnectionSlots, Displaced, network_of
from trioengine.testing import simulated_engine

VERSION = request("/version")
BODY = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


async def is_closed(stream):
    """Without an answer."""
    with trio.move_on_after(0.5):
        return await stream.receive_some() == b""
    return False


@pytest.mark.parametrize("sent", [b"", VERSION[:20], BODY, BODY[:-1]], ids=["nothing", "head", "body", "no body"])
async def test_waiting_connections_make_room(autojump_clock, sent):
    """Each newcomer has the connection closed that has waited longest for its client."""
    async with open_clients(max_connections=3) as clients:
        waiting = []
        for _ in range(3):
            waiting.append(clients.stream())
            await waiting[-1].send_all(sent)
            await wait_all_tasks_blocked()
        for oldest in waiting[:2]:
            assert status_and_body(await clients.http(VERSION))[0] == 200
            assert await is_closed(oldest)
        assert not await is_closed(waiting[2])
        await waiting[2].aclose()
        await clients.all_closed()
        assert clients.server.connections._slots.left == 3


async def test_idle_connections_make_room(autojump_clock):
    """It has waited since its last answer, not since it came."""
    async with open_clients(max_connections=2) as clients:
        first, second = clients.stream(), clients.stream()
        for stream in (first, second, first):
            await stream.send_all(VERSION)
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200 ")
        assert status_and_body(await clients.http(VERSION))[0] == 200
        assert await is_closed(second)
        await first.aclose()


async def test_a_flood_of_half_heads(autojump_clock):
    """Many times as many as there are slots: each newcomer that asks is answered."""
    async with open_clients(max_connections=8) as clients:
        for _ in range(20):
            for _ in range(8):
                await clients.stream().send_all(VERSION[:-2])
            await wait_all_tasks_blocked()
            for asked in (VERSION, HEALTH):
                assert status_and_body(await clients.http(asked))[0] == 200
        await trio.sleep(60)
        await clients.all_closed()
        assert clients.server.connections._slots.left == 8


async def test_a_request_being_handled_keeps_its_place(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        slow = SlowDoor(clients, max_connections=1)
        async with slow.asked() as stream:
            ours, theirs = trio.testing.memory_stream_pair()
            async with trio.open_nursery() as refused:
                refused.start_soon(slow.handle, theirs)
                await ours.send_all(VERSION)
                assert status_and_body(await read_all(ours))[0] == 503
            slow.may_answer.set()
            assert status_and_body(await read_all(stream))[0] == 200


# ---- refused connections whose client does not close them -----------------------------------------------------------

REFUSED = request("/version", host="evil.org")
GOODBYE = (1000).to_bytes(2)


async def lingering(clients, *exchange):
    """The client's end of a connection that has its last word, and is not closed by the client."""
    stream = clients.stream()
    for sent, end in exchange:
        await stream.send_all(sent)
        await read_until(stream, end)
    await wait_all_tasks_blocked()
    return stream


LINGERING = {
    "refused": [(REFUSED, b"}")],
    "unreadable": [(b"garbage\r\n\r\n", b"}")],
    "websocket": [(HANDSHAKE, b"session.created"), (frame(GOODBYE, 8), GOODBYE)],
}


@pytest.mark.parametrize("exchange", LINGERING.values(), ids=LINGERING)
async def test_lingering_connections_hold_no_places(autojump_clock, exchange):
    """They make room before a connection that has waited longer."""
    async with open_clients(max_connections=3) as clients:
        idle = clients.stream()
        await idle.send_all(VERSION)
        await read_until(idle, b"}")
        first, second = [await lingering(clients, *exchange) for _ in range(2)]
        before = trio.current_time()
        for _ in range(2):
            newcomer = await lingering(clients, (VERSION, b"}"))
            await newcomer.aclose()
        assert trio.current_time() == before
        assert await is_closed(first)
        await second.aclose()
        assert not await is_closed(idle)
        await idle.aclose()
        await clients.all_closed()
        assert clients.server.connections._slots.left == 3
        assert not clients.server.connections._slots._lingering


async def test_one_that_lingers_is_read_to_its_end_where_there_is_room(autojump_clock):
    async with open_clients(max_connections=3) as clients:
        stream = await lingering(clients, (REFUSED, b"}"))
        await stream.send_all(b"x" * 100_000)
        await trio.sleep(LINGER_TIMEOUT - 0.1)
        assert clients.server.connections._slots.left == 2
        await trio.sleep(0.2)
        assert clients.server.connections._slots.left == 3


async def test_refused_connections_beyond_the_limit_leave_room_for_probes(autojump_clock):
    async with open_clients(max_connections=1) as clients, clients.realtime():
        before = trio.current_time()
        for _ in range(2 * MAX_BEYOND):
            await lingering(clients, (VERSION, b"}"))
        await lingering(clients, (HEALTH, b'"ok"}'))
        assert trio.current_time() == before


# ---- beyond the limit -----------------------------------------------------------------------------------------------

KEYS = {"api_key": "k" * 16, "admin_key": "a" * 16}
BEYOND = [
    ("/health", None, 200),
    ("/ready", None, 200),
    ("/is_sleeping", "a" * 16, 200),
    ("/is_sleeping", "k" * 16, 403),
    ("/is_sleeping", None, 401),
    ("/metrics", "a" * 16, 503),
    ("/", None, 503),
]


@pytest.mark.parametrize(("path", "key", "status"), BEYOND)
async def test_probes_and_operators_come_in_beyond_the_limit(autojump_clock, path, key, status):
    async with open_clients(max_connections=1, **KEYS) as clients:
        headers = [(b"Authorization", b"Bearer " + b"k" * 16)]
        async with clients.realtime(extra_headers=headers):
            more = f"Authorization: Bearer {key}\r\n" if key else ""
            assert status_and_body(await clients.http(request(path, more=more)))[0] == status


async def test_those_beyond_the_limit_have_little_time(autojump_clock):
    """And make room for each other meanwhile, so that a probe always comes in."""
    async with open_clients(max_connections=1) as clients, clients.realtime():
        streams = []
        for _ in range(2 * MAX_BEYOND):
            streams.append(clients.stream())
            await streams[-1].send_all(HEALTH[:-1])
        await wait_all_tasks_blocked()
        assert status_and_body(await clients.http(HEALTH))[0] == 200
        before = trio.current_time()
        answer = await read_all(streams[-1], silence=100)
        assert trio.current_time() - before <= BEYOND_TIMEOUT
        assert status_and_body(answer)[0] == 503
        await trio.sleep(10)
        assert clients.server.connections._beyond.left == MAX_BEYOND


async def test_a_client_beyond_the_limit_that_leaves(autojump_clock):
    async with open_clients(max_connections=1) as clients, clients.realtime():
        for sent in (b"", HEALTH[:10], VERSION, HANDSHAKE):
            stream = clients.stream()
            await stream.send_all(sent)
            await stream.aclose()
        await trio.sleep(10)
        assert clients.server.connections._beyond.left == MAX_BEYOND


# ---- by address -----------------------------------------------------------------------------------------------------


async def test_one_address_cannot_take_the_places_of_another():
    """The connections of a greedy address make room first, though they are not the oldest."""
    async with on_loopback(max_connections=2 * SHARE) as server:

        async def connected(address):
            return await trio.open_tcp_stream("127.0.0.1", server.port, local_address=address)

        modest = await connected("127.0.0.2")
        await modest.send_all(HEALTH)
        await read_until(modest, b"ok")
        greedy = []
        for _ in range(5 * SHARE):
            greedy.append(await connected("127.0.0.3"))
            await greedy[-1].send_all(VERSION[:20])
        newcomer = await connected("127.0.0.4")
        for stream in (newcomer, modest):
            await stream.send_all(VERSION)
            assert (await read_until(stream, b"}")).startswith(b"HTTP/1.1 200 ")
        for stream in (newcomer, modest, *greedy):
            await stream.aclose()


def test_addresses():
    assert network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert network_of("2001:db8::1") == network_of("2001:db8::2:3:4:5") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") == "2001:db8:0:1::/64"
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of(None) is None


async def test_the_order_in_which_connections_make_room():
    """Of an address over its share the oldest, the newcomer's own before another's; else the oldest of all."""
    slots = ConnectionSlots(SHARE * 2)
    left = []

    async def wait(name, address, task_status):
        with slots.take(address) as slot:
            try:
                with slot.waiting(math.inf):
                    task_status.started()
                    await trio.sleep_forever()
            except Displaced:
                left.append(name)

    async with trio.open_nursery() as nursery:
        for number in range(SHARE * 2 - 6):
            await nursery.start(wait, f"single {number}", f"single {number}")
        for name in ("b", "a"):
            for number in range(3):
                await nursery.start(wait, f"{name}{number}", name)
        for address in ("a", "c", "d", "a", "a"):
            await nursery.start(wait, f"late {address}", address)
            await wait_all_tasks_blocked()
        assert left == ["a0", "b0", "a1", "single 0", "a2"]
        nursery.cancel_scope.cancel()
    assert slots.left == SHARE * 2
    assert not slots._waiting
    assert not slots._of_addresses
    assert not slots._over_share


async def test_only_so_many_make_room_at_once():
    """Their descriptors are not free before they are closed."""
    slots = ConnectionSlots(MAX_LEAVING + 1)
    async with trio.open_nursery() as nursery:

        async def wait(task_status):
            with slots.take(None) as slot, pytest.raises(Displaced), slot.waiting(math.inf):
                task_status.started()
                await trio.sleep_forever()

        for _ in range(MAX_LEAVING + 1):
            await nursery.start(wait)
        with slots.take("x") as first:
            assert first is not None
            takers = [slots.take("x") for _ in range(MAX_LEAVING)]
            taken = [taker.__enter__() for taker in takers]
            assert [slot is None for slot in taken] == [False] * (MAX_LEAVING - 1) + [True]
            for taker in takers:
                taker.__exit__(None, None, None)
        nursery.cancel_scope.cancel()
