"""Those who wait in line are ended with all others, by a label, or by their own end; each is counted once."""

import pytest
import trio
from helpers.expectations import LONG, everything_is_given_back
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, RequestRejected, SamplingParams, SessionEnded
from trioengine.core.lifecycle import Power
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine

ONE_SLOT = EngineConfig(model="toy", max_num_seqs=1, max_num_queued_reqs=0, max_num_batched_tokens=64)
ONE_SESSION = EngineConfig(model="toy", max_sessions=1)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
@pytest.mark.parametrize("way", ["abort_all", "sleep"])
async def test_all_that_wait_in_line_are_aborted(autojump_clock, config, way):
    """Be it the line for a session's slot or for a request's; no slot that is given back is handed to one of them."""
    async with simulated_engine(config) as (engine, simulation):
        completions = []

        async def ask():
            completions.append(await engine.generate("x", LONG, wait=True))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            if way == "sleep":
                await engine.sleep()
                assert engine.power.power is Power.ASLEEP
                assert not len(engine.runtime.gate.requests) and not len(engine.runtime.gate.sessions)
            else:
                assert engine.abort_all() == 4
        assert [completion.cause for completion in completions] == [Cause(way)] * 4
        assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
        assert sum(bool(completion.token_ids) for completion in completions) <= 1
        statistics = engine.statistics()
        assert (statistics.received, statistics.aborted, statistics.rejected) == (4, 4, 0)
        assert statistics.abort_causes[Cause(way)] == 4
        await everything_is_given_back(engine, simulation)


@pytest.mark.parametrize("wait", [None, True])
async def test_a_sleep_ends_sessions_in_line_however_they_wait(autojump_clock, wait):
    async with simulated_engine(ONE_SESSION) as (engine, _), engine.open_session(), trio.open_nursery() as nursery:

        async def enter():
            with pytest.raises(SessionEnded) as caught:
                await engine.open_session(wait=wait).__aenter__()
            assert caught.value.cause == "sleep"

        nursery.start_soon(enter)
        await wait_all_tasks_blocked()
        await engine.sleep()


async def test_a_session_in_line_is_ended_by_its_own_end(autojump_clock):
    """It is not opened later, and leaves no slot taken."""
    async with simulated_engine(ONE_SESSION) as (engine, _), trio.open_nursery() as nursery:
        async with engine.open_session():
            second = engine.open_session()

            async def enter():
                with pytest.raises(SessionEnded) as caught:
                    await second.__aenter__()
                assert caught.value.cause == "client"

            nursery.start_soon(enter)
            await wait_all_tasks_blocked()
            second.end()
        await wait_all_tasks_blocked()
        assert (engine.statistics().sessions, engine.statistics().rejected) == (0, 1)


async def test_a_session_that_waits_for_its_slot_is_ended_too(autojump_clock):
    async with simulated_engine(ONE_SESSION) as (engine, _), engine.open_session(), trio.open_nursery() as nursery:

        async def enter():
            with pytest.raises(SessionEnded, match="abort_all") as caught:
                await engine.open_session(wait=True).__aenter__()
            assert caught.value.cause == "abort_all"

        nursery.start_soon(enter)
        await wait_all_tasks_blocked()
        assert engine.abort_all() == 0  # no request
        await wait_all_tasks_blocked()
        assert (len(engine.runtime.gate.sessions), engine.statistics().rejected) == (0, 1)


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_who_waits_is_kept_through_a_sleep(autojump_clock, config, mode):
    """With `keep_waiting`, and where what runs is not aborted either. They are served after the wake."""
    async with simulated_engine(config) as (engine, _), trio.open_nursery() as nursery:
        completions = []

        async def ask():
            completions.append(await engine.generate("x", SHORT, wait=True))

        for _ in range(3):
            nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        await engine.sleep(mode=mode, keep_waiting=mode == "abort")
        assert len(completions) == (0 if mode == "keep" else 1)
        await engine.wake()
        await trio.sleep(100)
        assert [completion.cause for completion in completions] == [
            Cause.SLEEP if mode == "abort" else None,
            None,
            None,
        ]


async def test_who_comes_after_the_call_waits_for_the_wake(autojump_clock):
    """Also where the sleep stands in a queue behind a change that takes longer."""
    async with simulated_engine() as (engine, _), trio.open_nursery() as nursery:
        completions = []

        async def ask():
            completions.append(await engine.generate("x", SHORT, wait=True))

        nursery.start_soon(engine.generate, "x", LONG)
        await wait_all_tasks_blocked()
        nursery.start_soon(lambda: engine.sleep(mode="wait"))
        await wait_all_tasks_blocked()
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        nursery.start_soon(engine.sleep, 1)
        await wait_all_tasks_blocked()
        assert completions[0].cause is Cause.SLEEP
        nursery.start_soon(ask)
        await trio.sleep(100)
        assert len(completions) == 1
        await engine.wake()
        await trio.sleep(100)
        assert completions[1].finish_reason is FinishReason.LENGTH


async def test_keep_waiting_is_true_or_false(autojump_clock, simulated):
    engine, _ = simulated
    with pytest.raises(RequestRejected, match="keep_waiting"):
        await engine.sleep(keep_waiting="no")
    assert engine.power.power is Power.AWAKE


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
async def test_a_caller_that_is_cancelled_in_line_is_counted_as_aborted(autojump_clock, config):
    async with simulated_engine(config) as (engine, simulation):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, "x", SHORT)
            await wait_all_tasks_blocked()
            with trio.move_on_after(0.001) as scope:
                await engine.generate("x", SHORT, wait=True)
            assert scope.cancelled_caught
            engine.runtime.gate.check()
        statistics = engine.statistics()
        assert (statistics.received, statistics.finished, statistics.aborted, statistics.rejected) == (2, 1, 1, 0)
        assert statistics.abort_causes[Cause.CLIENT] == 1
        await everything_is_given_back(engine, simulation)


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION])
async def test_refused_and_then_aborted_in_one_step(autojump_clock, config):
    """The refusal has not reached its caller when the abort comes: it is counted once, as what its caller gets."""
    completions = []
    async with trio.open_nursery() as nursery:
        async with simulated_engine(config) as (engine, _):

            async def ask():
                completions.append(await engine.generate("x", LONG, wait=True))

            for _ in range(2):
                nursery.start_soon(ask)
                await wait_all_tasks_blocked()
            engine.close()
            assert engine.abort_all(Cause.SHUTDOWN) == 2
    statistics = engine.statistics()
    assert [completion.cause for completion in completions] == [Cause.SHUTDOWN] * 2
    assert (statistics.received, statistics.aborted, statistics.rejected) == (2, 2, 0)


async def test_a_session_that_is_cancelled_in_line_is_counted_as_refused(autojump_clock):
    async with simulated_engine(ONE_SESSION) as (engine, _), engine.open_session():
        with trio.move_on_after(1) as scope:
            await engine.open_session(wait=True).__aenter__()
        assert scope.cancelled_caught
        assert (engine.statistics().received, engine.statistics().rejected) == (0, 1)


async def test_a_request_that_waits_for_the_one_before_it_is_counted_too(autojump_clock, simulated):
    """The session's request is being stopped, and its next one has no slot yet."""
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as first:
        await anext(first)
        first.abort()
        with trio.move_on_after(0) as scope:
            await session.generate("two").__aenter__()
        assert scope.cancelled_caught
        assert (engine.statistics().received, engine.statistics().aborted) == (2, 1)


async def test_each_end_is_told_once(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as generation:
        await anext(generation)
        assert [engine.abort(generation.request_id) for _ in range(3)] == [1, 0, 0]
        assert (engine.abort_all(), generation.abort()) == (0, False)
        await generation.result()
        assert engine.abort(generation.request_id) == 0


async def test_abort_all_counts_what_it_ends(autojump_clock, simulated):
    """In preparation or at the worker, not what was aborted before."""
    engine, _ = simulated
    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(lambda number=number: engine.generate("x", LONG, label=str(number)))
        await wait_all_tasks_blocked()
        assert engine.abort("3") == 1
        assert [engine.abort_all(), engine.abort_all()] == [4, 0]


@pytest.mark.parametrize("config", [ONE_SLOT, ONE_SESSION, None])
async def test_all_of_a_label_are_ended(autojump_clock, config):
    """At the worker, in either line; those of another label, or of none, go on."""
    async with simulated_engine(config) as (engine, simulation):
        completions = {}

        async def ask(number, label):
            completions[number] = await engine.generate("x", LONG, label=label, wait=True)

        async with trio.open_nursery() as nursery:
            for number, label in enumerate(["mine", "other", None, "mine"]):
                nursery.start_soon(ask, number, label)
                await wait_all_tasks_blocked()
            assert [engine.abort(label) for label in ("nobody's", "mine", "mine")] == [0, 2, 0]
        assert {number: completions[number].cause for number in range(4)} == {
            0: Cause.CLIENT,
            1: None,
            2: None,
            3: Cause.CLIENT,
        }
        await everything_is_given_back(engine, simulation)


async def test_a_label_of_a_session_is_not_its_requests(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session(label="session") as session:
        async with session.generate("one", LONG, label="turn") as generation:
            assert [engine.abort("session"), engine.abort("turn")] == [0, 1]
            assert (await generation.result()).cause is Cause.CLIENT
        with pytest.raises(RequestRejected, match="label must be a string"):
            session.generate("one", label=7)
