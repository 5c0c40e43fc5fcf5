"""An engine on a simulated worker that must have given everything back in the end."""

import pytest
from helpers.expectations import everything_is_given_back

from trioengine.testing import simulated_engine


@pytest.fixture
async def simulated(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        yield engine, simulation
        await everything_is_given_back(engine, simulation)
