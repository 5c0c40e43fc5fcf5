"""Each test of this folder runs over an engine, and over a client of a server."""

import pytest
from helpers.sides import SIDES, open_side


@pytest.fixture
def config():
    """The engine's configuration; None: the simulation's own."""
    return


@pytest.fixture
def simulation_options():
    """Options of `simulated_engine`."""
    return {}


@pytest.fixture(params=SIDES)
async def side(request, config, simulation_options):
    async with open_side(request.param, config, **simulation_options) as side:
        yield side


@pytest.fixture
async def session(side):
    async with side.api.open_session() as session:
        yield session
