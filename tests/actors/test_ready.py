"""`ready()` after the worker's death: from the step in which that can be known it waits for the next worker."""

import pytest
import trio

from trioengine import EngineClosed, EngineConfig, WorkerLost
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour


async def test_ready_waits_for_the_next_worker(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        for incarnation in (2, 3):
            simulation.worker.kill()
            await engine.ready()
            assert engine.statistics().incarnation == incarnation
            assert (await engine.generate("hello")).finish_reason is not None


async def test_ready_does_not_wait_where_the_worker_lives(autojump_clock):
    """Nor where it hangs, as long as that is not known."""
    async with simulated_engine() as (engine, simulation):
        simulation.worker.hang()
        began = trio.current_time()
        await engine.ready()
        assert trio.current_time() == began


@pytest.mark.parametrize("way", ["sleep", "close", "no worker"])
async def test_ready_after_a_death_that_is_not_followed_by_a_worker(autojump_clock, way):
    """Asleep it waits for the wake; where none will come it raises the reason."""
    behaviours = [Behaviour(), Behaviour(load_time=5)]
    config = EngineConfig(model="toy", max_restarts=1)
    told = None
    try:
        async with simulated_engine(config, behaviours=behaviours) as (engine, simulation):
            if way == "sleep":
                await engine.sleep()
            simulation.worker.kill()
            with trio.move_on_after(1 if way == "sleep" else 100) as scope:
                if way == "close":
                    engine.close()
                try:
                    await engine.ready()
                except (EngineClosed, WorkerLost) as exc:
                    told = exc
            assert scope.cancelled_caught is (way == "sleep")
    except WorkerLost:
        assert way == "no worker"
    assert isinstance(told, {"sleep": type(None), "close": EngineClosed, "no worker": WorkerLost}[way])
