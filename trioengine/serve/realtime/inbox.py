"""The messages of a client, from their receipt until they are handled."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeAlias

import trio

from trioengine.serve.errors import OverBudget
from trioengine.serve.limits import ALWAYS_TAKEN, Held, size_of
from trioengine.serve.websocket import AcceptedWebSocket

MAX_UNHANDLED = 64  # events that were received and not handled
MAX_UNHANDLED_SIZE = 8 << 20  # bytes of memory of unhandled events
Message: TypeAlias = str | bytes | OverBudget  # the error replaces a message that was not kept


class Flood(Exception):
    """A client sends more than is handled."""


class Inbox:
    """Messages in the order of their receipt, of one WebSocket at a time; `held` accounts for their bytes."""

    def __init__(self, held: Held) -> None:
        self.source: AcceptedWebSocket | None = None  # messages of others are dropped
        self._held = held
        self._size = 0  # bytes in memory
        self._send_channel, self._receive_channel = trio.open_memory_channel[Message](MAX_UNHANDLED)

    async def receive_from(self, websocket: AcceptedWebSocket) -> None:
        """Read without pause, even while messages are unhandled, as only reading detects a disconnect.

        Returns once the WebSocket is not the source. Raises ConnectionClosed, and Flood.
        """
        while self._size <= _max_size(websocket):
            if not await self._receive_next(websocket):
                await _discard(websocket)
            if self.source is not websocket:
                return
        raise Flood(f"more than {_max_size(websocket)} bytes of unhandled events")

    async def _receive_next(self, websocket: AcceptedWebSocket) -> bool:
        """Take the next message, without keeping a reference; False if an error replaces it."""
        message = await self._next_message(websocket)
        if self.source is not websocket:
            return True
        if not isinstance(message, OverBudget):
            self._held.charge(size_of(message))
            self._size += size_of(message)
        try:
            self._send_channel.send_nowait(message)
        except trio.WouldBlock:
            raise Flood(f"more than {MAX_UNHANDLED} unhandled events") from None
        return not isinstance(message, OverBudget)

    async def _next_message(self, websocket: AcceptedWebSocket) -> Message:
        """Return the next message, or the error that replaces it."""
        try:
            message = await websocket.get_message()
            if size_of(message) > ALWAYS_TAKEN:
                self._held.check_room(size_of(message))
        except OverBudget as exc:
            return exc
        return message

    async def next(self) -> Message:
        """Return the oldest message, which counts until `remove`."""
        return await self._receive_channel.receive()

    def remove(self, size: int) -> None:
        """Count a message of this size no more, as it is being handled; its caller gives its bytes back to `held`."""
        self._size -= size


def _max_size(websocket: AcceptedWebSocket) -> int:
    """Return the bytes of memory that unhandled messages may have; at least one message."""
    return max(MAX_UNHANDLED_SIZE, 4 * websocket.max_message_size())


async def _discard(websocket: AcceptedWebSocket) -> None:
    """Read and drop messages after one that was not kept, until the disconnect. Raises ConnectionClosed."""
    while True:
        with suppress(OverBudget):
            await websocket.get_message()
