"""A timeout raises TimedOut with what came until then, wherever the request stands."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import trio
from helpers.expectations import GREEDY, LONG
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineAsleep, EngineConfig, EngineOverloaded, TimedOut, open_engine
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import Simulation, simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS

ONE_SLOT = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0, max_num_batched_tokens=64)
ONE_SESSION = EngineConfig(model="toy", max_sessions=1)


def check_empty(error):
    """The request never started."""
    completion = error.completion
    assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.TIMEOUT)
    assert (completion.text, completion.token_ids, completion.usage.completion_tokens) == ("", (), 0)


async def test_a_request_that_waits_at_the_worker(autojump_clock):
    limits = replace(DEFAULT_LIMITS, max_num_seqs=1)
    async with simulated_engine(limits=limits) as (engine, _):
        async with engine.open_session() as session, session.generate("one", LONG):
            with pytest.raises(TimedOut) as caught:
                await engine.generate("two", GREEDY, timeout=0.1)
    check_empty(caught.value)


@pytest.mark.parametrize("wait", [None, True])
@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
async def test_a_request_in_line(autojump_clock, config, wait):
    async with simulated_engine(config) as (engine, _):
        async with engine.open_session() as session, session.generate("one", LONG):
            with pytest.raises(TimedOut, match=r"waiting: all 1 .* taken") as caught:
                await engine.generate("two", GREEDY, timeout=0.1, wait=wait)
            assert isinstance(caught.value.__cause__, EngineOverloaded)
            statistics = engine.statistics()
            assert (statistics.rejected, statistics.abort_causes[Cause.TIMEOUT]) == (0, 1)
    check_empty(caught.value)


async def test_a_request_that_is_prepared(autojump_clock):
    async def take_a_second(function, *args):
        await trio.sleep(1)
        return function(*args)

    async with trio.open_nursery() as nursery:
        ports = replace(Simulation(nursery).ports, run_in_thread=take_a_second, thread_threshold=0)
        async with open_engine("toy", ports=ports) as engine, engine.open_session() as session:
            with pytest.raises(TimedOut) as caught:
                async with session.generate("one", GREEDY, timeout=0.5):
                    raise AssertionError("it was not prepared")
            check_empty(caught.value)
            assert engine.statistics().aborted == 1


async def test_a_request_behind_one_that_stops(autojump_clock):
    async with simulated_engine() as (engine, simulation), engine.open_session() as session:
        async with trio.open_nursery() as nursery:
            async with session.generate("one", LONG) as first:
                await anext(first)
                simulation.worker.stall()
                nursery.cancel_scope.cancel()
        with pytest.raises(TimedOut) as caught:
            await session.ask("two", GREEDY, timeout=0.1)
        check_empty(caught.value)


async def test_asleep(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", LONG, timeout=5.0) as kept:
            await anext(kept)
            await engine.sleep(mode="keep")
            with pytest.raises(TimedOut) as caught:
                await kept.result()
            assert caught.value.completion.text
    with pytest.raises(TimedOut, match="asleep") as caught:
        await engine.generate("two", GREEDY, wait=True, timeout=5)
    check_empty(caught.value)
    with pytest.raises(EngineAsleep):
        await engine.generate("two", GREEDY, timeout=5)


async def test_while_the_engine_restarts(autojump_clock):
    behaviours = [Behaviour(), Behaviour(load_time=50)]
    async with simulated_engine(behaviours=behaviours) as (engine, simulation):
        simulation.worker.kill()
        await trio.sleep(1)
        with pytest.raises(TimedOut, match="restarting") as caught:
            await engine.generate("two", GREEDY, wait=True, timeout=5)
        check_empty(caught.value)


async def test_the_wait_for_a_session(autojump_clock):
    async with simulated_engine(ONE_SESSION) as (engine, _), engine.open_session():
        before = trio.current_time()
        with pytest.raises(TimedOut, match=r"all 1 sessions are taken \(max_sessions\)") as caught:
            async with engine.open_session(timeout=3):
                raise AssertionError("there was no slot")
        assert caught.value.completion is None
        assert trio.current_time() - before == pytest.approx(3)


async def test_a_finish_that_is_in_time(autojump_clock, simulated):
    engine, _ = simulated
    assert (await engine.generate("one", GREEDY, timeout=100)).cause is None
    await wait_all_tasks_blocked()


@pytest.mark.parametrize(("timeout", "finished"), [(2, 0), (4, 1)])
async def test_a_finish_that_comes_after_the_deadline_changes_nothing(autojump_clock, timeout, finished):
    """The worker is in its only step when the deadline passes, and finishes the request there."""
    async with simulated_engine(behaviours=[Behaviour(step_time=3)]) as (engine, _), engine.open_session() as session:
        generation = session.generate("one", max_tokens=1, timeout=timeout)
        with nullcontext() if finished else pytest.raises(TimedOut):
            async with generation:
                await generation.result()
        completion = generation.completion
        await generation.wait_settled()
        assert generation.completion == completion
        assert (len(completion.token_ids), len(session.history)) == (finished, 2 * finished)
        assert (engine.statistics().finished, engine.statistics().aborted) == (finished, 1 - finished)
        await engine.check_invariants()
