"""The fixtures of the front's tests."""

import pytest
from helpers.clients import open_clients

from trioengine import connect


@pytest.fixture
def engine_config():
    """None: the simulation's own."""
    return


@pytest.fixture
def tls():
    """Whether the connections of `clients` are secured; a module that tries both has a fixture of its own."""
    return False


@pytest.fixture
async def clients(autojump_clock, engine_config, tls):
    """A server whose engine is ready; at the end no session, request or task may be left."""
    async with open_clients(engine_config, tls=tls) as clients:
        yield clients


@pytest.fixture
async def remote(clients):
    """trioengine.connect, on a connection in memory to the server of `clients`."""
    async with connect("ws://localhost", dial=clients.dial) as client:
        yield client
