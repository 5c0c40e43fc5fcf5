"""What a user types, or a pipe brings, as UTF-8 text; bytes that are none become surrogates, for whoever checks."""

from __future__ import annotations

import os

import trio

from trioengine.cli.keys import STDIN
from trioengine.core.errors import RequestRejected

MAX_LINE = 16 << 20  # bytes
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
        self._rest = bytearray()

    async def next(self) -> str | None:
        """A line without its end; None at the end of the input.

        Raises RequestRejected for a line that is too long; there is no next one then.
        """
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0 and len(self._rest) <= MAX_LINE:
            searched = len(self._rest)
            data = await trio.to_thread.run_sync(os.read, self._fd, _CHUNK, abandon_on_cancel=True)
            if not data:
                if not self._rest:
                    return None
                end = searched
                break
            self._rest += data
        if not 0 <= end <= MAX_LINE:
            raise RequestRejected("too_large", f"a line of the input is longer than {MAX_LINE} bytes", param="prompt")
        line = self._rest[:end]
        del self._rest[: end + 1]
        return line.decode("utf-8", "surrogateescape")
