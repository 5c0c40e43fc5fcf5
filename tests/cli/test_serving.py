"""`trioengine serve` as a task: its log, and its end."""

import signal
from functools import partial

import trio
import trio.testing

from trioengine import EngineConfig
from trioengine.cli.serving import _serve
from trioengine.serve.server import serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour


async def test_a_signal_before_it_is_ready_is_a_clean_end(autojump_clock, caplog):
    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery, behaviours=[Behaviour(load_time=1000)])
        serving = partial(serve, EngineConfig(model="toy"), "127.0.0.1", 0, ports=simulation.ports)

        async def interrupt():
            while not (simulation.workers and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL):
                await trio.lowlevel.checkpoint()
            signal.raise_signal(signal.SIGTERM)

        nursery.start_soon(interrupt)
        with trio.fail_after(100):
            await _serve(serving, 30.0)
