"""Front doors with routes of a test's own, before those of the server of `clients`."""

from contextlib import asynccontextmanager

import trio
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from helpers.frames import request
from trioengine.serve.access import Access
from trioengine.serve.departures import Departures
from trioengine.serve.front_door import FrontDoor
from trioengine.serve.http import json_response
from trioengine.serve.routes import Route


def front_door(clients, path, handler, departures=None, max_connections=8):
    """A GET of `path` is answered by the handler, everything else as the server does it."""
    config, door = clients.server.config, clients.server.front_door
    return FrontDoor(
        {**door._routes, path: Route({"GET": handler})},
        Access(config),
        door._check_upgrade,
        door._realtime,
        budget=clients.server.budget,
        departures=Departures() if departures is None else departures,
        limits=config.limits,
        takes_images=lambda: clients.engine.takes_images,
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
        self.departures = Departures()
        self.may_answer = trio.Event()
        self.was_cancelled = False
        self._door = front_door(clients, "/slow", self._answer, self.departures, **options)
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
