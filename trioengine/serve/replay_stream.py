"""A stream whose first bytes were read already: h11 looks at a request, then trio-websocket parses it again."""

from __future__ import annotations

import trio

from trioengine.serve.sockets import Sender


class ReplayStream(trio.abc.Stream):
    """`stream`, but first the bytes `seen`."""

    def __init__(self, seen: bytes, stream: trio.abc.Stream) -> None:
        self._seen = seen
        self._stream = stream
        self._sender = Sender(stream)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if not self._seen:
            return await self._stream.receive_some(max_bytes)
        await trio.lowlevel.checkpoint()
        length = len(self._seen) if max_bytes is None else max_bytes
        data, self._seen = self._seen[:length], self._seen[length:]
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._sender.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()
