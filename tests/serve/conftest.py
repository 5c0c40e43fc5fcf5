"""The fixture of the front's tests."""

import pytest
import trio
from clients import Clients

from trioengine import connect
from trioengine.testing import simulated_engine


@pytest.fixture
async def clients(autojump_clock):
    """A server whose engine is ready; at the end no session, request or task may be left."""
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery)
        yield clients
        clients.server.front_door.close_idle()
        with trio.fail_after(60):
            await clients.all_closed()
            await clients.everything_is_given_back()


@pytest.fixture
async def remote(clients):
    """trioengine.connect, on a connection in memory to the server of `clients`."""
    async with connect("ws://localhost", dial=clients.dial) as client:
        yield client
