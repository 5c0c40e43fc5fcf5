"""Performs the actions of the fuzzer by URL on a fake in the same trio run: in memory, so that MockClock is enough."""

from contextlib import suppress

import trio
from trio.testing import memory_stream_pair

from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.wire import Close


class MemoryConnection:
    """A client's end of a connection in memory."""

    def __init__(self, client, server):
        self.client, self.server = client, server

    async def send(self, data):
        await self.client.send_all(data)

    async def receive(self):
        return bytes(await self.client.receive_some())

    def leave(self, how):
        if how is Close.RST:
            self.server.receive_stream.close()  # its reads fail, now and later
        if how is not Close.HALF:
            self.client.receive_stream.close()
        self.client.send_stream.close()


class MemoryDriver(TrioDriver):
    """Performs actions on `server`, a FaultyServer that may be replaced by another one."""

    def __init__(self, server, nursery):
        super().__init__("memory", 80)
        self.server, self.nursery = server, nursery

    async def dial(self):
        client, server = memory_stream_pair()
        self.nursery.start_soon(self.accept, self.server, server)
        await trio.lowlevel.checkpoint()
        return MemoryConnection(client, server)

    def figures(self):
        return self.server.memory, self.server.files

    async def accept(self, server, stream):
        with suppress(trio.BrokenResourceError):  # of the close, when the client has left
            async with stream:
                await server.accept(stream)
