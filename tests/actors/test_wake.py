"""Waking: all or in part, with or without the worker that fell asleep; a wake that fails leaves the engine asleep."""

import logging

import pytest
import trio
from helpers.expectations import GREEDY, LONG, reference, said

from trioengine import EngineAsleep, EngineConfig, TimedOut, TransitionFailed
from trioengine.core.lifecycle import Power
from trioengine.core.messages import Wake
from trioengine.core.power import Tag
from trioengine.testing import simulated_engine


async def test_who_waits_is_served_after_the_wake(autojump_clock, simulated):
    engine, _ = simulated
    await engine.sleep()
    answers = []

    async def ask(timeout):
        answers.append(await engine.generate("one", GREEDY, wait=True, timeout=timeout))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, None)
        with pytest.raises(TimedOut):
            await engine.generate("one", GREEDY, wait=True, timeout=1)
        assert not answers
        await engine.wake()
    assert list(answers[0].token_ids) == reference(engine, "one")


async def test_a_string_is_one_tag(autojump_clock, simulated):
    engine, _ = simulated
    await engine.sleep()
    await engine.wake("kv_cache")
    assert engine.power.asleep == {"weights"}
    await engine.wake("weights")
    assert (engine.state, engine.state.value) == ("awake", "awake")


@pytest.mark.parametrize("order", [("weights", "kv_cache"), ("kv_cache", "weights")])
@pytest.mark.parametrize("level", [1, 2])
async def test_tags_wake_in_either_order(autojump_clock, simulated, order, level):
    engine, _ = simulated
    await engine.sleep(level)
    for tag in order:
        assert engine.power.level == level
        await engine.wake([tag])
    assert (engine.state, engine.power.level) == (Power.AWAKE, None)
    assert list((await engine.generate("one", GREEDY)).token_ids) == reference(engine, "one")


@pytest.mark.parametrize("tags", [None, ["weights"]])
async def test_a_wake_that_fails_leaves_it_asleep(autojump_clock, simulated, tags):
    engine, simulation = simulated
    await engine.sleep(2)
    simulation.worker.runner.fail_wakes = 1
    with pytest.raises(TransitionFailed, match="made not to wake"):
        await engine.wake(tags)
    assert (engine.state, len(engine.power.asleep)) == (Power.ASLEEP, 2)
    with pytest.raises(EngineAsleep):
        await engine.generate("one", GREEDY)
    await engine.wake()
    assert list((await engine.generate("one", GREEDY)).token_ids) == reference(engine, "one")


async def test_a_worker_that_dies_asleep_is_started_by_the_wake(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as stream:
        await anext(stream)
        await engine.sleep(mode="keep")
        simulation.worker.kill()
        await trio.sleep(100)  # simulated: longer than any restart delay, and nobody starts it
        assert (engine.statistics().worker_pid, len(simulation.workers)) == (None, 1)
        await engine.wake(["weights"])
        assert simulation.worker.runner.asleep == {Tag.KV_CACHE}
        await engine.wake()
        assert list((await stream.result()).token_ids) == reference(engine, "one", LONG)
    assert len(simulation.workers) == 2


async def test_a_worker_that_dies_waking_is_no_wake(autojump_clock, simulated):
    engine, simulation = simulated
    await engine.sleep()
    simulation.worker.kill()
    while engine.statistics().worker_pid is not None:
        await engine.runtime.gate.changed()
    simulation.failing_starts = 1
    with pytest.raises(TransitionFailed, match="made not to start"):
        await engine.wake()
    assert engine.state is Power.ASLEEP
    await engine.wake()
    await engine.generate("one", GREEDY)


async def test_a_worker_that_hangs_while_it_wakes_is_lost(autojump_clock):
    config = EngineConfig(model="toy", startup_timeout=20)
    async with simulated_engine(config) as (engine, simulation):
        await engine.sleep()
        simulation.worker.hang()
        with pytest.raises(TransitionFailed, match="no answer"):
            await engine.wake()
        await engine.wake()
        await engine.generate("one", GREEDY)
        assert len(said(simulation, Wake)) == 1


async def test_the_log_tells_what_was_done_and_what_was_not(autojump_clock, simulated, caplog):
    """`ready` is for who waits until requests are admitted."""
    engine, simulation = simulated
    caplog.set_level(logging.INFO, "trioengine")
    caplog.clear()
    await engine.sleep(2, mode="keep")
    while engine.runtime.gate.link is None:  # the next worker starts
        await engine.runtime.gate.changed()
    simulation.worker.runner.fail_wakes = 1
    with pytest.raises(TransitionFailed):
        await engine.wake(["weights"])
    await engine.wake()
    assert caplog.messages == [
        "sleep at level 2 (keep): begins; requests in flight: 0, sessions: 0",
        "sleep at level 2 (keep): requests aborted: 0, suspended: 0; sessions detached: 0",
        "sleep at level 2 (keep): the engine is asleep, with weights 1",
        "a worker has started (asleep): toy on cpu, simulated kernels",
        "wake of weights failed: made not to wake",
        "wake of kv_cache and weights: the engine is awake, with weights 1",
    ]
