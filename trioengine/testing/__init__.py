"""The test kit: a simulated worker under the real engine, for tests of programs that embed trioengine.

async def test_my_program(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        completion = await engine.generate("hello")
        assert completion.text == simulation.reference(...)
"""

from trioengine.testing.simulated_worker import SimulatedWorker as SimulatedWorker
from trioengine.testing.simulation import Simulation as Simulation
from trioengine.testing.simulation import simulated_engine as simulated_engine
from trioengine.testing.toy_model import ToyRunner as ToyRunner
from trioengine.testing.toy_model import toy_answer as toy_answer
from trioengine.testing.toy_model import toy_model as toy_model
