"""Front doors with routes of a test's own, before the routes of the server of `clients`."""

from contextlib import asynccontextmanager

import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from helpers.frames import request
from trioengine.serve.auth import Access
from trioengine.serve.body import DisconnectCounter
from trioengine.serve.connection import ConnectionHandler
from trioengine.serve.http import json_response
from trioengine.serve.routes import Route


def connection_handler(clients, path, handler, disconnects=None, max_connections=8):
    """A GET of `path` is answered by the handler, everything else as the server does it."""
    config, door = clients.server.config, clients.server.connections
    return ConnectionHandler(
        {**door._routes, path: Route({"GET": handler})},
        Access(config),
        door._check_upgrade,
        door._realtime,
        budget=clients.server.budget,
        disconnects=DisconnectCounter() if disconnects is None else disconnects,
        limits=config,
        takes_images=lambda: clients.engine.runtime.takes_images,
        max_connections=max_connections,
    )


@asynccontextmanager
async def asked(door, path, *pair, more=b""):
    """The stream of a client whose GET of `path` is being handled, with `more` behind it; it is closed at the end."""
    ours, theirs = pair or memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(door.handle, theirs)
        await ours.send_all(request(path) + more)
        await wait_all_tasks_blocked()
        yield ours
        await ours.aclose()


class SlowDoor:
    """A front door whose `/slow` is answered when it may be."""

    def __init__(self, clients, **options):
        self.disconnects = DisconnectCounter()
        self.may_answer = trio.Event()
        self.was_cancelled = False
        self._door = connection_handler(clients, "/slow", self._answer, self.disconnects, **options)
        self.handle = self._door.handle

    async def _answer(self, request):
        try:
            await self.may_answer.wait()
        except trio.Cancelled:
            self.was_cancelled = True
            raise
        return json_response(200, {})

    def asked(self, *pair):
        return asked(self._door, "/slow", *pair)
