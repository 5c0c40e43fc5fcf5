"""Pipes between processes."""

from __future__ import annotations

import os
from contextlib import suppress

import trio

READ_SIZE = 1 << 16  # bytes


class PipeReader(trio.abc.ReceiveStream):
    """The reading end of a pipe, which it owns; nothing else may read from it.

    `receive_some` passes once through trio's scheduler, where a `trio.lowlevel.FdStream` does so twice: it first tries
    to read, which never succeeds between two steps of a worker.
    """

    def __init__(self, fd: int) -> None:
        self._stream = trio.lowlevel.FdStream(fd)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes; b"" at the end of the stream. Cancelled, it has taken nothing.

        Raises ClosedResourceError if this end was closed, BusyResourceError if another task waits here.
        """
        while True:
            await trio.lowlevel.wait_readable(self._open_fd())
            with suppress(BlockingIOError):  # a wake-up without bytes
                return os.read(self._open_fd(), max_bytes or READ_SIZE)

    def _open_fd(self) -> int:
        """The descriptor; after a wait another task may have closed it, and its number may be another file's."""
        fd = self._stream.fileno()
        if fd < 0:
            raise trio.ClosedResourceError("the pipe was closed")
        return fd

    def close(self) -> None:
        """Close the descriptor; a task that waits in `receive_some` gets ClosedResourceError."""
        self._stream.close()

    async def aclose(self) -> None:
        """Close, and checkpoint."""
        await self._stream.aclose()
