"""Bytes on their way in one direction, and the end that they are written to."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Wire:
    """Bytes arrive at once, or when they are moved; so many of them fit before a write blocks."""

    def __init__(self, arrive: Callable[[bytes], None], size: int, *, by_hand: bool) -> None:
        self.by_hand = by_hand
        self._arrive = arrive
        self._size = size
        self._bytes = bytearray()
        self._moved = trio.Event()

    def __len__(self) -> int:
        return len(self._bytes)

    def put(self, data: bytes) -> None:
        """Write, whatever the wire holds."""
        self._bytes += data
        if not self.by_hand:
            self.move()

    async def room(self) -> None:
        """Wait until a write would not block."""
        while len(self._bytes) >= self._size:
            self._moved = trio.Event()
            await self._moved.wait()

    def move(self, count: int | None = None) -> None:
        """Let so many bytes arrive, or all."""
        if self._bytes and count != 0:
            data = bytes(self._bytes[:count])
            del self._bytes[:count]
            self._moved.set()
            self._arrive(data)

    def cut(self) -> None:
        """What is on its way is lost."""
        self._bytes.clear()
        self._moved.set()


class WireEnd(trio.abc.SendStream):
    """A write moves in portions, like one to a pipe that fills; BrokenResourceError says `broken()`, if it does."""

    def __init__(self, wire: Wire, portion: int, broken: Callable[[], str | None]) -> None:
        self._wire = wire
        self._portion = portion
        self._broken = broken

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        for start in range(0, len(data), self._portion):
            await trio.lowlevel.checkpoint()
            await self._wire.room()
            if (reason := self._broken()) is not None:
                raise trio.BrokenResourceError(reason)
            self._wire.put(bytes(data[start : start + self._portion]))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
