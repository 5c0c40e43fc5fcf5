"""The standard error of the workers, as lines of the log."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from trioengine.actors.ports import Ports, spawn_worker
from trioengine.aio.nursery import open_unwrapped_nursery

logger = logging.getLogger("trioengine.worker")
END_TIMEOUT = 1.0  # seconds to read the last lines of a worker that has ended
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}
_CHUNK = 1 << 16  # bytes; a longer line is logged in pieces


@asynccontextmanager
async def logged_workers() -> AsyncIterator[Ports]:
    """Ports whose workers write to the log; leaving waits until their last lines are in it, a second at most."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    reading = trio.CancelScope(shield=True)
    async with open_unwrapped_nursery() as nursery:
        nursery.start_soon(_log_lines, trio.lowlevel.FdStream(readable), reading)
        try:
            yield Ports(spawn_worker=partial(spawn_worker, stderr=writable))
        finally:
            os.close(writable)
            reading.deadline = trio.current_time() + END_TIMEOUT


async def _log_lines(stream: trio.abc.ReceiveStream, reading: trio.CancelScope) -> None:
    rest = b""
    with reading:
        async with stream:
            while data := await stream.receive_some(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _CHUNK:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    _log(line)
    _log(rest)


def _log(line: bytes) -> None:
    """At the level that the worker's own logging put before the message; a library's line is a warning."""
    text = line.decode("utf-8", "backslashreplace").rstrip()
    level, _, message = text.partition(": ")
    if level in _LEVELS:
        logger.log(_LEVELS[level], "%s", message)
    elif text:
        logger.warning("%s", text)
