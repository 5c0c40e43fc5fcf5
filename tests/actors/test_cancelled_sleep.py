"""Who asked for a sleep is cancelled at any pass, whatever the engine is doing: a defined state, and nobody hangs."""

import contextlib
import functools

import pytest
import trio
from helpers.expectations import GREEDY, everything_is_given_back, reference

from trioengine import EngineClosed, EngineOverloaded, SamplingParams, TransitionFailed, WorkerLost
from trioengine.core.lifecycle import Power
from trioengine.testing import simulated_engine

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
PASSES = [0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 30]
SETTLED = (Power.AWAKE, Power.ASLEEP, Power.DRAINING, Power.CLOSED)


async def quietly(call):
    """What it is refused for is somebody else's matter."""
    with contextlib.suppress(TransitionFailed, WorkerLost, EngineOverloaded, EngineClosed):
        await call()


async def settled(engine):
    """Nothing is pending, and the engine is in a state that lasts."""
    while engine.runtime.gate.is_change_pending or engine.runtime.gate.power not in SETTLED:
        await engine.runtime.gate.changed()


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("during", ["nothing", "restart", "wake", "update"])
async def test_a_sleeper_is_cancelled(autojump_clock, during, level, mode, twice, passes):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
        async with engine.open_session() as session, session.generate("one", LONG) as stream:
            await anext(stream)
            match during:
                case "restart":
                    simulation.worker.kill()
                    while engine.runtime.gate.power is Power.AWAKE:
                        await trio.lowlevel.checkpoint()
                case "wake":
                    await engine.sleep(mode="keep")
                    nursery.start_soon(engine.wake)
                case "update":
                    nursery.start_soon(functools.partial(engine.update_weights, "toy", mode="keep"))
            async with trio.open_nursery() as sleepers:
                for _ in range(2 if twice else 1):
                    sleepers.start_soon(functools.partial(engine.sleep, level, mode=mode))
                for _ in range(passes):
                    await trio.lowlevel.checkpoint()
                sleepers.cancel_scope.cancel()
            await settled(engine)
            await engine.check_invariants()
            await engine.wake()
            await engine.check_invariants()
            completion = await stream.result()
            expected = reference(engine, "one", LONG)
            assert list(completion.token_ids) == expected[: len(completion.token_ids)]
        assert list((await engine.generate("two", GREEDY)).token_ids) == reference(engine, "two")
        await everything_is_given_back(engine, simulation)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("end", ["drain", "close"])
async def test_the_engine_ends_under_a_sleep(autojump_clock, end, passes):
    async with simulated_engine() as (engine, _), trio.open_nursery() as nursery:
        async with engine.open_session() as session, session.generate("one", LONG) as stream:
            await anext(stream)
            nursery.start_soon(quietly, functools.partial(engine.sleep, 2, mode="keep"))
            for _ in range(passes):
                await trio.lowlevel.checkpoint()
            if end == "drain":
                await engine.drain()
                await quietly(engine.check_invariants)
            else:
                engine.close()
            assert (await stream.result()).finish_reason is not None
