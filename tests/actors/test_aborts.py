"""Leaving, aborting, cancelling and running out of time, at many moments."""

from contextlib import nullcontext

import pytest
import trio
from helpers.expectations import GREEDY, LONG, everything_is_given_back, reference
from trio.testing import wait_all_tasks_blocked

from trioengine import SessionBusy, SessionEnded, TimedOut
from trioengine.cli.app import chat
from trioengine.core.messages import StopSession
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine, toy_answer


@pytest.mark.parametrize("passes", range(12))
async def test_cancelled_after_some_passes(autojump_clock, passes):
    """The caller is cancelled at any point of entering, streaming and leaving: everything is given back, and the turn
    is either there as a whole or not at all."""
    async with simulated_engine(thread_passes=3) as (engine, simulation):
        async with engine.open_session() as session:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(use_session, session, "x" * 30)
                    for _ in range(passes):
                        await wait_all_tasks_blocked() if passes % 2 else await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert session.history in ([], session.history[:2])
            async with session.generate("again", GREEDY) as generation:
                await generation.result()
            assert session.history[-2] == chat("again")[0]
        await everything_is_given_back(engine, simulation)


async def use_session(session, prompt):
    async with session.generate(prompt, LONG) as generation:
        async for _ in generation:
            pass


async def test_leaving_early_takes_the_turn_back_and_waits(autojump_clock, simulated):
    engine, simulation = simulated
    async with engine.open_session() as session:
        async with session.generate("one", GREEDY) as generation:
            await generation.result()
        committed = session.history
        async with session.generate("two", LONG) as generation:
            async for _ in generation:
                break
        assert generation._state.settled.is_set()
        assert generation.completion.cause is Cause.CLIENT
        assert session.history == committed
        stops = [message for message in simulation.worker.received if isinstance(message, StopSession)]
        assert len(stops) == 1
        async with session.generate("three", GREEDY) as generation:
            third = await generation.result()
        prompt = engine.tokenizer.apply_chat_template([*committed, *chat("three")])
        assert list(third.token_ids) == toy_answer(prompt, 40)


async def test_keep_partial_keeps_what_was_read(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", LONG, keep_partial=True) as generation:
            text = (await anext(generation)).text + (await anext(generation)).text
        assert session.history[-1]["content"].startswith(text)
        assert generation.completion.finish_reason is FinishReason.ABORT
        async with session.generate("two", GREEDY) as generation:
            await generation.result()


async def test_abort_twice_and_after_the_end(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            await anext(generation)
            generation.abort()
            generation.abort()
            completion = await generation.result()
            assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.CLIENT)
            generation.abort()
        generation.abort()
        assert not engine.abort(generation.request_id)
        session.end()
        session.end()
        with pytest.raises(SessionEnded) as caught:
            async with session.generate("two"):
                pass
        assert caught.value.cause == "client"
        await session.ended()


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
