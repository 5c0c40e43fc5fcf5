"""The test kit: a simulated worker under the real engine, for tests of programs that embed trioengine.

    async def test_my_program(autojump_clock):
        async with simulated_engine() as (engine, simulation):
            completion = await engine.generate([7, 8, 9], SamplingParams(max_tokens=5, ignore_eos=True))
            assert list(completion.token_ids) == toy_answer([7, 8, 9], 5, ignore_eos=True)

The fuzzer, `trioengine.testing.fuzz`, needs the extra `fuzz`.
"""

from trioengine.testing.simulated_worker import SimulatedWorker as SimulatedWorker
from trioengine.testing.simulation import Simulation as Simulation
from trioengine.testing.simulation import simulated_engine as simulated_engine
from trioengine.testing.toy_model import toy_answer as toy_answer
from trioengine.testing.toy_model import toy_model as toy_model
from trioengine.testing.toy_runner import ToyRunner as ToyRunner
