"""Requests and sessions that wait for a slot of a whole engine."""

from contextlib import nullcontext, suppress
from functools import partial

import pytest
import trio
from helpers.expectations import GREEDY, LONG
from trio.testing import wait_all_tasks_blocked

from trioengine import (
    EngineAsleep,
    EngineClosed,
    EngineConfig,
    EngineOverloaded,
    SamplingParams,
    SessionEnded,
    TimedOut,
)
from trioengine.actors.waiting_line import WaitingLine
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour

ONE_SLOT = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0, max_num_batched_tokens=64)
ONE_SESSION = EngineConfig(model="toy", max_sessions=1)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
async def test_answers_come_in_the_order_of_the_questions(autojump_clock, config):
    answered = []
    async with simulated_engine(config) as (engine, _), trio.open_nursery() as nursery:

        async def ask(number):
            await engine.generate("x", SHORT, wait=True)
            answered.append(number)

        for number in range(20):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
    assert answered == list(range(20))


async def test_who_asks_again_and_again_starves_nobody(autojump_clock):
    """Who had a slot and wants the next one waits behind those who wait; who does not wait is refused meanwhile."""
    async with simulated_engine(ONE_SLOT) as (engine, _), trio.open_nursery() as nursery:

        async def insist():
            while True:
                await engine.generate("x", SHORT, wait=True)

        async def try_in_every_pass():
            while True:
                with pytest.raises(EngineOverloaded):
                    await engine.generate("x", SHORT, wait=False)
                await trio.sleep(0.001)

        nursery.start_soon(insist)
        nursery.start_soon(insist)
        await wait_all_tasks_blocked()
        nursery.start_soon(try_in_every_pass)
        for _ in range(5):
            assert (await engine.generate("x", GREEDY, wait=True, timeout=5)).finish_reason is not FinishReason.ABORT
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["abort", "end", "cancel", "timeout"])
async def test_who_leaves_the_line_passes_its_turn_on(autojump_clock, way):
    """In whatever way the first one goes: the second gets the slot, and the first is counted as aborted."""
    async with simulated_engine(ONE_SLOT) as (engine, _), trio.open_nursery() as nursery:
        leaving = trio.CancelScope()
        told = {"end": SessionEnded, "timeout": TimedOut}.get(way)
        session = await engine.open_session().__aenter__()
        generation = session.generate("two", LONG, wait=True, timeout=0.5 if way == "timeout" else None)

        async def wait_and_leave():
            with leaving, pytest.raises(told) if told is not None else nullcontext():
                await generation.__aenter__()

        async with engine.open_session() as first, first.generate("one", LONG) as running:
            nursery.start_soon(wait_and_leave)
            await wait_all_tasks_blocked()
            nursery.start_soon(lambda: engine.generate("three", SHORT, wait=True))
            await wait_all_tasks_blocked()
            if way == "timeout":
                await trio.sleep(0.6)
            else:
                {"abort": generation.abort, "end": session.end, "cancel": leaving.cancel}[way]()
            await wait_all_tasks_blocked()
            assert len(engine.runtime.gate.requests) == 1
            await running.result()
        while engine.statistics().finished < 2:
            await engine.runtime.gate.changed()
        statistics = engine.statistics()
        assert (statistics.received, statistics.aborted, statistics.rejected) == (3, 1, 0)
        assert statistics.abort_causes[Cause.TIMEOUT if way == "timeout" else Cause.CLIENT] == 1
        engine.runtime.gate.check()
        session.end()


async def test_a_session_that_ends_tells_its_request_at_once(autojump_clock):
    """It need not be the first in the line, and no slot need become free."""
    async with simulated_engine(ONE_SLOT) as (engine, _), trio.open_nursery() as nursery:
        async with engine.open_session() as first, first.generate("one", LONG), engine.open_session() as second:
            nursery.start_soon(lambda: engine.generate("two", SHORT, wait=True))
            await wait_all_tasks_blocked()
            told = trio.Event()

            async def enter():
                with pytest.raises(SessionEnded):
                    await second.generate("three", wait=True).__aenter__()
                told.set()

            nursery.start_soon(enter)
            await wait_all_tasks_blocked()
            before, began = engine.statistics(), trio.current_time()
            second.end(Cause.DISCONNECT)
            await told.wait()
            after = engine.statistics()
            assert trio.current_time() == began
            assert (after.rejected, after.aborted) == (before.rejected, before.aborted + 1)
            assert after.abort_causes[Cause.DISCONNECT] == 1


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
@pytest.mark.parametrize("way", ["drain", "close", "cancel"])
async def test_all_are_told_when_the_engine_goes(autojump_clock, config, way):
    told = []
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with simulated_engine(config) as (engine, _), engine.open_session() as session:

                async def ask():
                    with pytest.raises((EngineClosed, SessionEnded)) as caught:
                        await engine.generate("x", SHORT, wait=True)
                    told.append(caught.value)

                async with session.generate("x", LONG):
                    for _ in range(3):
                        nursery.start_soon(ask)
                    await wait_all_tasks_blocked()
                    if way == "drain":
                        await engine.drain()
                    elif way == "close":
                        engine.close()
                    else:
                        scope.cancel()
    assert len(told) == 3


@pytest.mark.parametrize("passes", range(6))
async def test_a_session_slot_is_handed_over_while_the_engine_is_cancelled(autojump_clock, passes):
    """A session that got its slot in the last steps of the engine is ended with it; none is admitted later."""

    async def wait(engine):
        with suppress(EngineClosed):
            async with engine.open_session(wait=True) as session:
                await session.ended()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with simulated_engine(ONE_SESSION) as (engine, _), engine.open_session() as session:
                nursery.start_soon(wait, engine)
                await wait_all_tasks_blocked()
                session.end()
                for _ in range(passes):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
                await trio.sleep_forever()
    assert engine.statistics().sessions == 0


async def test_requests_that_wait_through_a_restart_keep_their_order(autojump_clock):
    answered = []
    behaviours = [Behaviour(), Behaviour(load_time=5)]
    async with (
        simulated_engine(ONE_SLOT, behaviours=behaviours) as (engine, simulation),
        trio.open_nursery() as nursery,
    ):

        async def ask(number):
            await engine.generate("x", SHORT, wait=True)
            answered.append(number)

        simulation.worker.kill()
        await trio.sleep(0.5)
        for number in range(5):
            nursery.start_soon(ask, number)
            await wait_all_tasks_blocked()
    assert answered == list(range(5))


@pytest.mark.parametrize("waits_longer", [True, False])
async def test_all_that_is_in_flight_is_aborted_and_who_is_kept_in_line_gets_the_slot(autojump_clock, waits_longer):
    """Whether the waiting request's session is older than the aborted one's or not."""
    async with (
        simulated_engine(ONE_SLOT) as (engine, _),
        engine.open_session() as first,
        engine.open_session() as second,
    ):
        running, waiting = (second, first) if waits_longer else (first, second)
        outcomes = {}

        async def ask(session, params):
            async with session.generate("x", params, wait=True) as generation:
                outcomes[session] = (await generation.result()).finish_reason

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, running, LONG)
            await wait_all_tasks_blocked()
            nursery.start_soon(ask, waiting, SHORT)
            await wait_all_tasks_blocked()
            assert engine.abort_all(keep_waiting=True) == 1
        assert outcomes == {running: FinishReason.ABORT, waiting: FinishReason.LENGTH}


async def test_an_admission_may_serve_its_own_line(autojump_clock):
    """Nobody is admitted twice."""
    line, admitted = WaitingLine(), []

    def admission(name):
        admitted.append(name)
        line.serve()

    async with trio.open_nursery() as nursery:
        for name in "ab":
            nursery.start_soon(line.wait, partial(admission, name))
            await wait_all_tasks_blocked()
        line.serve()
    assert admitted == ["a", "b"]


# ---- for how long: `wait` -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
async def test_a_request_waits_for_a_slot_unless_it_is_told_not_to(autojump_clock, config):
    async with simulated_engine(config) as (engine, _), engine.open_session() as session:
        async with trio.open_nursery() as nursery:
            async with session.generate("one", LONG) as running:
                with pytest.raises(EngineOverloaded) as refused:
                    await engine.generate("two", SHORT, wait=False)
                assert refused.value.is_full
                answered = []
                nursery.start_soon(lambda: ask_and_note(engine, answered))
                await wait_all_tasks_blocked()
                await running.result()
            session.end()
        assert len(answered) == 1


async def ask_and_note(engine, answered):
    answered.append(await engine.generate("x", SHORT))


@pytest.mark.parametrize("how", ["sleep", "update", "restart"])
@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
async def test_the_line_is_left_when_more_than_a_slot_is_missing(autojump_clock, config, how):
    """By those that wait for a slot only; the others stay, and are served in their order."""
    answered, refused = [], []
    behaviours = [Behaviour(), Behaviour(load_time=5)]
    async with simulated_engine(config, behaviours=behaviours) as (engine, simulation), trio.open_nursery() as nursery:

        async def ask(number):
            try:
                await engine.generate("x", SHORT, wait=True if number % 2 else None)
                answered.append(number)
            except (EngineAsleep, EngineOverloaded):
                refused.append((number, trio.current_time()))

        async with engine.open_session() as session, session.generate("one", LONG):
            for number in range(6):
                nursery.start_soon(ask, number)
                await wait_all_tasks_blocked()
            before = trio.current_time()
            if how == "sleep":
                nursery.start_soon(partial(engine.sleep, mode="wait"))
            elif how == "update":
                nursery.start_soon(partial(engine.update_weights, "toy", mode="keep"))
            else:
                simulation.worker.kill()
            await wait_all_tasks_blocked(0.01)
        if how == "sleep":
            await engine.sleep(keep_waiting=True)
            await engine.wake()
    expected = [0] if how == "restart" and config is ONE_SESSION else [0, 2, 4]  # sessions are opened meanwhile
    assert sorted(number for number, _ in refused) == expected
    assert all(at - before < 0.2 for _, at in refused)
    assert [number for number in answered if number % 2] == [1, 3, 5]
    assert len(answered) == 6 - len(expected)
