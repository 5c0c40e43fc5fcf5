"""A server on a loopback port, with a simulated worker, for clients that need a socket."""

from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from trioengine import EngineConfig
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS

STEP_TIME = 0.001


@asynccontextmanager
async def on_loopback(limits=DEFAULT_LIMITS, **options):
    """The server; clients that have gone must have left nothing. Cancelled, it breaks its connections off."""
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery, limits=limits, behaviours=[Behaviour(load_time=0, step_time=STEP_TIME)])
        fields: dict[str, Any] = {"port": 0, "served_model_name": "toy"} | options
        config = ServeConfig(**fields)
        engine_config = EngineConfig(model="toy", max_num_seqs=8)
        server = await nursery.start(partial(serve, engine_config, config, ports=simulation.ports))
        await server.engine.ready()
        yield server
        with trio.fail_after(30):
            while server.engine.statistics().sessions:
                await server.engine.runtime.gate.changed()
            await server.engine.check_invariants()
            assert server.engine.runtime.images.budget.payloads == ()
        server.abort()
