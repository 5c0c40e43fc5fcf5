"""A worker that is lost, or retires, while the engine falls asleep: which one follows it, and what that costs."""

import contextlib
import functools

import pytest
import trio

from trioengine import EngineConfig, TransitionFailed
from trioengine.core.lifecycle import Power
from trioengine.core.messages import Fatal, FatalCode
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour

AGES = 30  # seconds: longer than any restart delay, and nobody starts a worker in them


async def fall_asleep(engine, level, mode="abort"):
    with contextlib.suppress(TransitionFailed):
        await engine.sleep(level, mode=mode)


async def restart(simulation):
    """Until the next worker begins to load."""
    simulation.worker.kill()
    while len(simulation.workers) < 2 or not simulation.worker.received:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("passes", range(16))
async def test_nothing_follows_a_worker_that_retires_as_the_engine_closes(autojump_clock, passes):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        nursery.start_soon(fall_asleep, engine, 2)
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        before = len(simulation.workers)
        engine.close()
    assert len(simulation.workers) == before


@pytest.mark.parametrize("passes", range(16))
async def test_nothing_follows_one_that_retires_asleep_as_the_engine_drains(autojump_clock, passes):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        await engine.sleep(1)
        nursery.start_soon(fall_asleep, engine, 2, "keep")
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        before = len(simulation.workers)
        await engine.drain()
        await trio.sleep(AGES)
        assert len(simulation.workers) == before


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("passes", range(0, 30, 2))
async def test_a_worker_that_dies_on_the_way_to_sleep_has_slept(autojump_clock, level, passes):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(engine.sleep, level))
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        simulation.worker.kill()
        await trio.sleep(AGES)
        assert (engine.state, engine.power.level) == (Power.ASLEEP, level)
        await engine.wake()
        await engine.generate("x", wait=True)


@pytest.mark.parametrize("level", [1, 2])
async def test_the_last_death_on_the_way_to_sleep_ends_nothing(autojump_clock, level):
    config = EngineConfig(model="toy", max_restarts=2)
    async with simulated_engine(config) as (engine, simulation), trio.open_nursery() as nursery:
        await restart(simulation)
        nursery.start_soon(engine.sleep, level)
        while engine.state is not Power.FALLING_ASLEEP:
            await engine.runtime.gate.changed()
        simulation.worker.kill()
        await trio.sleep(AGES)
        assert (engine.state, len(simulation.workers)) == (Power.ASLEEP, 2)
        await engine.wake()
        await engine.generate("x")


async def test_a_worker_that_finds_no_model_on_the_way_to_sleep_ends_nothing(autojump_clock):
    behaviours = [Behaviour(), Behaviour(fatal=Fatal(FatalCode.MODEL, "the file is gone", "")), Behaviour()]
    async with simulated_engine(behaviours=behaviours) as (engine, simulation):
        await restart(simulation)
        await engine.sleep()
        await trio.sleep(AGES)
        assert (engine.state, len(simulation.workers)) == (Power.ASLEEP, 2)
        await engine.wake()
        await engine.generate("x")


async def test_a_worker_that_retires_is_no_death(autojump_clock):
    async with simulated_engine(EngineConfig(model="toy", max_restarts=2)) as (engine, simulation):
        for _ in range(3):
            await engine.sleep(2)
            await engine.wake()
        assert engine.statistics().restarts == 0
        simulation.worker.kill()
        await engine.generate("x", wait=True)
        assert engine.statistics().restarts == 1


async def test_one_that_retires_is_no_death_where_nothing_can_follow_it(autojump_clock):
    async with simulated_engine(EngineConfig(model="toy", max_restarts=2)) as (engine, simulation):
        simulation.failing_starts = 1
        await engine.sleep(2)
        await trio.sleep(AGES)
        assert engine.state is Power.ASLEEP
        await engine.wake()
        await engine.generate("x")


async def test_a_wake_that_fails_is_no_death_either(autojump_clock):
    async with simulated_engine(EngineConfig(model="toy", max_restarts=2)) as (engine, simulation):
        await engine.sleep(2)
        await trio.sleep(AGES)
        simulation.worker.kill()
        await trio.sleep(AGES)
        simulation.failing_starts = 9
        for _ in range(3):
            with pytest.raises(TransitionFailed):
                await engine.wake()
        await trio.sleep(AGES)
        assert engine.state is Power.ASLEEP
        simulation.failing_starts = 0
        await engine.wake()
        await engine.generate("x")


async def test_nothing_follows_one_that_retires_awake_as_the_engine_drains(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        nursery.start_soon(fall_asleep, engine, 2)
        while not engine.runtime.supervisor.is_retiring:
            await trio.lowlevel.checkpoint()
        assert await engine.drain()
        await trio.sleep(AGES)
        assert len(simulation.workers) == 1


async def test_a_drained_engine_needs_no_worker(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        assert await engine.drain()
        simulation.failing_starts = 9
        simulation.worker.kill()
        await trio.sleep(AGES)
        assert (engine.state, len(simulation.workers)) == (Power.DRAINING, 1)


@pytest.mark.parametrize("passes", range(8))
async def test_the_count_of_restarts_never_falls(autojump_clock, passes):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        simulation.worker.kill()
        await trio.sleep(AGES)
        await engine.sleep(1)
        assert engine.statistics().restarts == 1
        nursery.start_soon(fall_asleep, engine, 2, "keep")
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        await engine.drain()
        await trio.sleep(AGES)
        assert engine.statistics().restarts == 1
