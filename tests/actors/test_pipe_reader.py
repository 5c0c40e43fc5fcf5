"""PipeReader: reads of a pipe, each in one pass of the scheduler; what closing and cancelling do to it."""

import os
from contextlib import suppress

import pytest
import trio

from trioengine.aio.pipes import PipeReader


@pytest.fixture
async def pipe(autojump_clock):
    reading, writing = os.pipe()
    reader = PipeReader(reading)
    with os.fdopen(writing, "wb", buffering=0) as writer:
        yield reader, writer
    reader.close()


async def test_bytes_and_the_end(autojump_clock, pipe):
    reader, writer = pipe
    writer.write(b"abc")
    assert await reader.receive_some(2) == b"ab"
    assert await reader.receive_some() == b"c"
    writer.close()
    assert await reader.receive_some() == b""
    assert await reader.receive_some() == b""


async def test_a_reader_waits_for_bytes(autojump_clock, pipe):
    reader, writer = pipe
    async with trio.open_nursery() as nursery:
        received = []

        async def read():
            received.append(await reader.receive_some())

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert received == []
        writer.write(b"late")
    assert received == [b"late"]


async def test_bytes_that_are_there_let_other_tasks_run(autojump_clock, pipe):
    reader, writer = pipe
    writer.write(b"ab")
    with trio.testing.assert_checkpoints():
        assert await reader.receive_some(1) == b"a"


async def test_a_cancelled_read_takes_nothing(autojump_clock, pipe):
    reader, writer = pipe
    writer.write(b"abc")
    with trio.CancelScope() as scope:
        scope.cancel()
        await reader.receive_some()
    assert scope.cancelled_caught
    assert await reader.receive_some() == b"abc"


async def test_closing_wakes_the_reader(autojump_clock, pipe):
    reader, _ = pipe
    async with trio.open_nursery() as nursery:

        async def read():
            with pytest.raises(trio.ClosedResourceError):
                await reader.receive_some()

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await reader.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await reader.receive_some()


async def test_two_readers(autojump_clock, pipe):
    reader, writer = pipe
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.receive_some)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await reader.receive_some()
        writer.write(b"x")


async def test_closed_between_the_wake_up_and_the_read(autojump_clock):
    """Whichever task runs first: a new file that gets the number is not read."""
    for _ in range(20):
        reading, writing = os.pipe()
        reader, received = PipeReader(reading), []

        async def read(reader=reader, received=received):
            with suppress(trio.ClosedResourceError):
                received.append(await reader.receive_some())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            os.write(writing, b"mine")
            await trio.lowlevel.checkpoint()
            reader.close()
            others = os.pipe()
            assert reading in others or received
            os.write(others[1], b"another's")
        assert received in ([], [b"mine"])
        for fd in (writing, *others):
            os.close(fd)
