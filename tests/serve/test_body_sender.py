"""Sending on a stream: at once where the kernel takes it, else as the stream does."""

import socket

import pytest
import trio
from trio.testing import assert_checkpoints, assert_no_checkpoints, memory_stream_pair

from trioengine.serve.body import Sender

LONG = bytes(range(256)) * 50_000


@pytest.fixture
async def pair():
    """Two connected sockets as streams, with little room between them."""
    ours, theirs = trio.socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    async with trio.SocketStream(ours) as ours, trio.SocketStream(theirs) as theirs:
        yield ours, theirs


async def read(stream, length):
    data = b""
    while len(data) < length:
        data += await stream.receive_some()
    return data


async def test_what_the_kernel_takes_is_sent_without_waiting(pair):
    ours, theirs = pair
    with assert_no_checkpoints():
        await Sender(ours).send_all(b"abc")
    assert await theirs.receive_some() == b"abc"


async def test_the_rest_waits_for_the_reader(pair):
    ours, theirs = pair
    sender = Sender(ours)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send_all, LONG)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        assert await read(theirs, len(LONG)) == LONG
    await sender.send_all(b"more")
    assert await theirs.receive_some() == b"more"


async def test_nothing_of_a_full_socket_is_lost(pair):
    ours, theirs = pair
    with trio.move_on_after(0):
        await Sender(ours).send_all(LONG)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sender(ours).send_all, b"behind")
        while not (await theirs.receive_some()).endswith(b"behind"):
            pass


async def test_what_is_taken_at_once(pair):
    ours, theirs = pair
    send_now = Sender(ours).send_now
    taken = send_now(LONG)
    assert 0 < taken < len(LONG)
    assert send_now(b"more") == 0
    assert await read(theirs, taken) == LONG[:taken]
    assert send_now(b"more") == 4
    await theirs.aclose()
    assert send_now(b"more") == 0


async def test_errors_are_the_streams(pair):
    ours, theirs = pair
    await theirs.aclose()
    with pytest.raises(trio.BrokenResourceError):
        await Sender(ours).send_all(b"abc")
    await ours.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await Sender(ours).send_all(b"abc")


async def test_a_stream_that_is_no_socket():
    ours, theirs = memory_stream_pair()
    with assert_checkpoints():
        await Sender(ours).send_all(b"abc")
    assert await theirs.receive_some() == b"abc"
