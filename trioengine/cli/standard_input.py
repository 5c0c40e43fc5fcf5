"""What a user types, or a pipe brings, as UTF-8 text; bytes that are none become surrogates, for whoever checks."""

from __future__ import annotations

import os

import trio

STDIN = 0
_CHUNK = 1 << 16


def read_all() -> str:
    """Standard input to its end; blocks."""
    with open(STDIN, encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        return file.read()


class Lines:
    """The lines of a descriptor, for trio.

    Its reads are in threads and not through `sys.stdin`, whose lock a thread that is left in a read would hold: the
    interpreter crashes over it when it ends.
    """

    def __init__(self, fd: int = STDIN) -> None:
        self._fd = fd
        self._rest = b""

    async def next(self) -> str:
        """A line without its end; "" for an empty one, and at the end of the input."""
        while b"\n" not in self._rest:
            data = await trio.to_thread.run_sync(os.read, self._fd, _CHUNK, abandon_on_cancel=True)
            if not data:
                break
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "surrogateescape")
