"""Leaving, aborting, cancelling and running out of time, at many moments."""

from contextlib import nullcontext

import pytest
import trio
from helpers.expectations import GREEDY, LONG, everything_is_given_back, reference
from trio.testing import wait_all_tasks_blocked

from trioengine import SessionBusy, TimedOut
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine


async def test_abort_never_downgrades_a_finish_on_its_way(autojump_clock, simulated):
    """The worker's last row is in the pipe when abort() is called: the answer is finished, not aborted."""
    engine, simulation = simulated
    expected = reference(engine, [5], LONG)
    async with engine.open_session() as session, session.generate([5], LONG) as generation:
        async for _ in generation:
            if len(simulation.worker.core.held_tokens(session.id)) == 1 + len(expected):
                generation.abort()
        assert generation.completion.finish_reason is FinishReason.LENGTH
        assert list(generation.completion.token_ids) == expected
    assert engine.statistics().aborted == 0


async def test_each_request_of_a_session_has_its_own_deadline(autojump_clock, simulated):
    """Whatever the one before it had: none, a later one, an earlier one, or one that passes while this one runs."""
    engine, _ = simulated
    async with engine.open_session() as session:
        for before in (None, 100, 0.5):
            for timeout in (None, 100, 0.1):
                session.replace_history([])
                async with session.generate([1, 2, 3], GREEDY, timeout=before) as generation:
                    assert (await generation.result()).cause is None
                began = trio.current_time()
                async with session.generate([1, 2, 3], LONG, timeout=timeout) as generation:
                    with pytest.raises(TimedOut) if timeout == 0.1 else nullcontext():
                        await generation.result()
                completion = generation.completion
                took = trio.current_time() - began
                if timeout == 0.1:
                    assert (completion.cause, took) == (Cause.TIMEOUT, pytest.approx(0.1, abs=0.03))
                else:
                    assert (completion.cause, took > 1) == (None, True)


async def test_abort_all_and_by_id(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as first, engine.open_session() as second:
        async with first.generate("one", LONG) as one, second.generate("two", LONG) as two:
            await anext(one)
            assert engine.abort(one.request_id)
            assert (await one.result()).cause is Cause.CLIENT
            engine.abort_all()
            assert (await two.result()).cause is Cause.ABORT_ALL
        assert engine.statistics().sessions == 2


async def test_two_hundred_rounds_of_everything_that_goes_wrong(autojump_clock):
    """Cancels, closes, aborts, exceptions, second users, at many moments, under load: nothing is left."""
    async with simulated_engine() as (engine, simulation):
        before = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for round_number in range(200):
                nursery.start_soon(go_wrong, engine, round_number)
        await everything_is_given_back(engine, simulation)
        await wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == before
        statistics = engine.statistics()
        assert statistics.received >= 200
        assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total


async def go_wrong(engine, round_number):
    await trio.sleep(round_number % 10 * 0.013)
    with trio.move_on_after(0.001 + round_number % 7 * 0.1):
        try:
            async with engine.open_session(wait=True) as session:
                async with session.generate(f"round {round_number}", LONG, wait=True) as generation:
                    async for _ in generation:
                        match round_number % 5:
                            case 0:
                                generation.abort()
                                generation.abort()
                            case 1:
                                raise ZeroDivisionError
                            case 2:
                                session.end()
                                session.end()
                            case 3:
                                with pytest.raises(SessionBusy):
                                    await session.generate("x").__aenter__()
        except ZeroDivisionError:
            pass
