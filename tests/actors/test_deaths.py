"""How many deaths of the worker end the engine: those in a row in which none was of any use."""

import pytest
import trio
from helpers.expectations import GREEDY, LONG

from trioengine import EngineConfig, WorkerLost
from trioengine.testing import simulated_engine

CONFIG = EngineConfig(model="toy", max_restarts=3, restart_delays=(0.0,))
MINUTES = 300  # seconds of life after which the deaths before are forgotten


async def kill(engine, simulation):
    """Kill the worker, and wait for the next one."""
    incarnation = engine.statistics().incarnation
    simulation.worker.kill()
    while engine.statistics().incarnation == incarnation or not engine.runtime.gate.is_awake:
        await engine.runtime.gate.changed()


async def test_a_request_that_was_streamed_and_left_is_of_use(autojump_clock):
    async with simulated_engine(CONFIG) as (engine, simulation):
        for _ in range(10):
            async with engine.open_session() as session, session.generate("one", LONG) as generation:
                await anext(generation)
            await kill(engine, simulation)
        assert (engine.statistics().finished, engine.statistics().restarts) == (0, 10)


async def test_a_request_that_was_aborted_without_a_token_is_of_none(autojump_clock):
    with pytest.raises(WorkerLost, match="died 3 times"):
        async with simulated_engine(CONFIG) as (engine, simulation):
            for _ in range(10):
                async with engine.open_session() as session, session.generate("one", LONG):
                    pass
                await kill(engine, simulation)


async def test_requests_that_kill_the_worker_after_their_first_token_fail_alone(autojump_clock):
    """The engine lives through any number of them, and serves others."""
    async with simulated_engine(CONFIG) as (engine, simulation):
        for _ in range(10):
            async with engine.open_session() as session, session.generate("one", LONG, wait=True) as generation:
                simulation.poisoned[generation.request_id] = 1
                await anext(generation)
                with pytest.raises(WorkerLost):
                    await generation.result()
        assert (await engine.generate("two", GREEDY, wait=True)).cause is None
        assert engine.statistics().failed == 10


async def test_a_worker_that_dies_before_any_token_counts(autojump_clock):
    """Though requests were admitted and left."""
    with pytest.raises(WorkerLost, match="died 3 times"):
        async with simulated_engine(CONFIG) as (engine, simulation):
            for _ in range(10):
                async with engine.open_session() as session:
                    generation = session.generate("one", LONG, wait=True)
                    await generation.__aenter__()
                    simulation.worker.hang()
                    generation.abort()
                    await kill(engine, simulation)


@pytest.mark.parametrize("lives", [MINUTES - 1, MINUTES + 1])
async def test_minutes_of_life_make_the_deaths_before_forgotten(autojump_clock, lives):
    dies = 10 if lives > MINUTES else 3
    deaths = 0
    try:
        async with simulated_engine(CONFIG) as (engine, simulation):
            for _ in range(10):
                await trio.sleep(lives)
                deaths += 1
                await kill(engine, simulation)
    except WorkerLost:
        assert lives < MINUTES
    assert deaths == dies


async def test_a_worker_that_hangs_does_not_live(autojump_clock):
    """However long: it was killed for it."""
    config = EngineConfig(model="toy", max_restarts=3, restart_delays=(0.0,), step_timeout=2 * MINUTES)
    with pytest.raises(WorkerLost, match="died 3 times"):
        async with simulated_engine(config) as (engine, simulation):
            for _ in range(10):
                simulation.worker.stall()
                incarnation = engine.statistics().incarnation
                while engine.statistics().incarnation == incarnation or not engine.runtime.gate.is_awake:
                    await engine.runtime.gate.changed()
