"""A server on a simulated worker, in a thread: for commands that connect to one."""

import threading
from contextlib import contextmanager
from typing import Any

import trio

from trioengine import EngineConfig
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour


@contextmanager
def served(step_time=0, **options):
    """A server in a thread; its URL, and a dictionary whose `statistics` are the engine's when it has ended."""
    started = threading.Event()
    told: dict[str, Any] = {}

    async def main():
        async with trio.open_nursery() as workers, trio.open_nursery() as nursery:
            simulation = Simulation(workers, behaviours=[Behaviour(load_time=0, step_time=step_time)])
            config = EngineConfig(model="toy", max_num_seqs=8)
            server = await nursery.start(_serve, config, ServeConfig(port=0, **options), simulation.ports)
            await server.engine.ready()
            told.update(server=server, token=trio.lowlevel.current_trio_token(), scope=workers.cancel_scope)
            started.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert started.wait(60)
    try:
        yield f"ws://127.0.0.1:{told['server'].port}", told["server"].engine
    finally:
        told["token"].run_sync_soon(told["scope"].cancel)
        thread.join()


async def _serve(config, serve_config, ports, *, task_status):
    await serve(config, serve_config, ports=ports, task_status=task_status)
