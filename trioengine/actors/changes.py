"""Something that changes, and the tasks that wait for the next change."""

from __future__ import annotations

import trio


class Changes:
    """`while not condition: await changes.wait()`, and whoever changes the condition calls `notify` in that step."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = trio.Event()

    def notify(self) -> None:
        """Wake every task that waits."""
        self._next.set()

    async def wait(self) -> None:
        """Wait until the next `notify`."""
        if self._next.is_set():
            self._next = trio.Event()
        await self._next.wait()
