"""The fixtures of the front's tests."""

import pytest
from helpers.clients import open_clients

from trioengine import connect


@pytest.fixture
def engine_config():
    """None: the simulation's own."""
    return


@pytest.fixture
async def clients(autojump_clock, engine_config):
    """A server whose engine is ready; at the end no session, request or task may be left."""
    async with open_clients(engine_config) as clients:
        yield clients


@pytest.fixture
async def remote(clients):
    """trioengine.connect, on a connection in memory to the server of `clients`."""
    async with connect("ws://localhost", dial=clients.dial) as client:
        yield client
