"""Sleep: the gate is closed from the first step, nothing computed before is used after, no caller hangs."""

import functools
from contextlib import nullcontext

import pytest
import trio
from helpers.expectations import GREEDY, LONG, everything_is_given_back, generated, reference, said
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineAsleep, TimedOut, TransitionFailed
from trioengine.core.lifecycle import Power
from trioengine.core.messages import Sleep
from trioengine.core.power import Tag
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine

MODES = ["abort", "wait", "keep"]


async def test_the_story_of_lmdeploy_4541_twice(autojump_clock, simulated):
    """A baseline; sleep in the middle of a stream; asleep nothing is taken; partly awake neither; all works again."""
    engine, simulation = simulated
    expected = reference(engine, "one")
    for _ in range(2):
        assert list((await engine.generate("one", GREEDY)).token_ids) == expected
        async with engine.open_session() as session, session.generate("two", LONG) as stream:
            await anext(stream)
            await engine.sleep()
            completion = await stream.result()
            assert (completion.finish_reason, completion.cause) == (FinishReason.ABORT, Cause.SLEEP)
            assert list(completion.token_ids) == reference(engine, "two", LONG)[: len(completion.token_ids)]
            with pytest.raises(EngineAsleep, match="asleep"):
                async with session.generate("three", GREEDY):
                    pass
            with pytest.raises(EngineAsleep):
                await engine.generate("three", GREEDY)
            await engine.wake(["kv_cache"])
            assert (engine.state, engine.power.asleep) == (Power.ASLEEP, {Tag.WEIGHTS})
            with pytest.raises(EngineAsleep):
                await engine.generate("three", GREEDY)
            await engine.wake()
            async with session.generate("one", GREEDY) as again:
                completion = await again.result()
            assert list(completion.token_ids) == expected
            assert completion.usage.cached_tokens == 0
    await everything_is_given_back(engine, simulation)


@pytest.mark.parametrize("mode", MODES)
async def test_what_becomes_of_a_stream(autojump_clock, simulated, mode):
    engine, simulation = simulated
    expected = reference(engine, "one", LONG)
    async with (
        engine.open_session() as session,
        session.generate("one", LONG) as stream,
        trio.open_nursery() as nursery,
    ):
        for _ in range(3):
            await anext(stream)
        nursery.start_soon(functools.partial(engine.sleep, mode=mode))
        await wait_all_tasks_blocked()
        while engine.state is not Power.ASLEEP:
            await engine.runtime.gate.changed()
        assert not simulation.worker.core.sessions
        assert (engine.statistics().suspended, engine.statistics().running) == (mode == "keep", 0)
        await engine.check_invariants()
        await engine.wake()
        completion = await stream.result()
    if mode == "abort":
        assert (completion.cause, list(completion.token_ids)) == (Cause.SLEEP, expected[: len(completion.token_ids)])
    else:
        assert (completion.finish_reason, list(completion.token_ids)) == (FinishReason.LENGTH, expected)
    assert (completion.resumed, completion.weight_versions) == (0, (1,))


async def test_waiting_is_bounded_by_the_timeout_and_never_by_a_reader(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", GREEDY) as unread:
            await engine.sleep(mode="wait")
            assert unread.outcome is not None
            await engine.wake()
            assert list((await unread.result()).token_ids) == reference(engine, "one")
        async with session.generate("two", LONG) as stream:
            await anext(stream)
            await engine.sleep(mode="wait", timeout=0.3)
            assert (await stream.result()).cause is Cause.SLEEP
        await engine.wake()


@pytest.mark.parametrize("mode", MODES)
async def test_a_finished_answer_that_was_not_read_stays_finished(autojump_clock, simulated, mode):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", GREEDY) as generation:
        while generation.outcome is None:
            await engine.runtime.gate.changed()
        await engine.sleep(mode=mode)
        completion = await generation.result()
        assert list(completion.token_ids) == reference(engine, "one")
        assert completion.finish_reason is not FinishReason.ABORT


async def test_the_gate_is_closed_from_the_first_step(autojump_clock, simulated):
    """Also for what is being prepared then, and where the call waits behind another change."""
    engine, _ = simulated
    async with engine.open_session() as session, trio.open_nursery() as nursery:
        engine.runtime.power.sleep(
            1, "abort", None, keep_waiting=False
        )  # as engine.sleep() before its first checkpoint
        assert engine.state is Power.AWAKE
        with pytest.raises(EngineAsleep, match="about to sleep"):
            async with session.generate("one", GREEDY):
                pass
        with pytest.raises(EngineAsleep):
            async with engine.open_session():
                pass
        await engine.wake()
        await engine.sleep()
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.wake()
        nursery.start_soon(engine.sleep)
        while not engine.runtime.gate.is_change_pending:
            await trio.lowlevel.checkpoint()
        assert engine.state in (Power.ASLEEP, Power.WAKING)
    assert engine.state is Power.ASLEEP
    await engine.wake()


async def test_what_is_prepared_is_refused_with_cause_sleep(autojump_clock):
    async with simulated_engine(thread_passes=20, thread_threshold=0) as (engine, simulation):
        async with engine.open_session() as session, trio.open_nursery() as nursery:
            generation = session.generate("one", GREEDY, wait=True)

            async def read():
                async with generation:
                    assert (await generation.result()).cause is Cause.SLEEP

            nursery.start_soon(read)
            while not engine.statistics().preparing:
                await trio.lowlevel.checkpoint()
            await engine.sleep(mode="wait")
            await engine.wake()
        await everything_is_given_back(engine, simulation)


@pytest.mark.parametrize("what", ["stop", "end", "timeout", "sleep", "drain"])
async def test_a_suspended_request_can_be_ended(autojump_clock, what):
    """By its reader, by its own time, by a sleep that aborts, and by a drain."""
    async with simulated_engine() as (engine, _):
        timeout = 5.0 if what == "timeout" else None
        async with engine.open_session() as session, session.generate("one", LONG, timeout=timeout) as stream:
            await anext(stream)
            await engine.sleep(mode="keep")
            assert engine.statistics().suspended == 1
            match what:
                case "stop":
                    stream.abort()
                case "end":
                    session.end()
                case "sleep":
                    await engine.sleep()
                case "drain":
                    assert not await engine.drain()
            with pytest.raises(TimedOut) if what == "timeout" else nullcontext():
                await stream.result()
            causes = {"timeout": Cause.TIMEOUT, "sleep": Cause.SLEEP, "drain": Cause.SHUTDOWN}
            assert stream.completion.cause is causes.get(what, Cause.CLIENT)
        assert (engine.statistics().suspended, engine.statistics().aborted) == (0, 1)


async def test_a_finish_on_its_way_wins(autojump_clock, simulated):
    """Rows that arrive until SESSION_ENDED count as delivered, and a finish among them is the outcome."""
    engine, simulation = simulated
    expected = reference(engine, "one")
    async with (
        engine.open_session() as session,
        session.generate("one", GREEDY) as stream,
        trio.open_nursery() as nursery,
    ):
        await generated(engine, len(expected) - 1)
        nursery.start_soon(functools.partial(engine.sleep, mode="keep"))
        simulation.worker.turn()  # its last token, before it reads END_SESSION
        completion = await stream.result()
        assert list(completion.token_ids) == expected
        assert engine.statistics().suspended == 0
    await engine.wake()


async def test_repeating_is_harmless(autojump_clock, simulated):
    engine, simulation = simulated
    await engine.wake()
    for _ in range(2):
        await engine.sleep(1)
    await engine.sleep(2)
    with pytest.raises(TransitionFailed, match="level 2"):
        await engine.sleep(1)
    await engine.wake(["weights"])
    await engine.wake(["weights"])
    await engine.sleep(1)
    for _ in range(2):
        await engine.wake()
    assert (len(said(simulation, Sleep)), len(simulation.workers)) == (2, 2)  # at level 2 the worker retired
    assert engine.state is Power.AWAKE


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda engine: engine.sleep(3), "level must be"),
        (lambda engine: engine.sleep(True), "level must be"),
        (lambda engine: engine.sleep("1"), "level must be"),
        (lambda engine: engine.sleep(mode="wait", timeout=float("nan")), "timeout must be"),
        (lambda engine: engine.update_weights("bad\udcff"), "path must be"),
        (lambda engine: engine.update_weights("x" * 5000), "path must be"),
        (lambda engine: engine.update_weights(b"x"), "path must be"),
        (lambda engine: engine.sleep(mode="nap"), "mode must be"),
        (lambda engine: engine.sleep(timeout=3), "timeout is for mode wait"),
        (lambda engine: engine.sleep(mode="wait", timeout=-1), "timeout must be"),
        (lambda engine: engine.wake(["weights", "dreams"]), "dreams"),
        (lambda engine: engine.wake("dreams"), "tags must be some of kv_cache, weights, got 'dreams'"),
        (lambda engine: engine.wake([]), "tags must be"),
        (lambda engine: engine.update_weights(""), "path"),
        (lambda engine: engine.update_weights("x", mode="nap"), "mode must be"),
    ],
)
async def test_what_is_unknown_is_an_error_and_changes_nothing(autojump_clock, simulated, call, why):
    engine, simulation = simulated
    with pytest.raises(ValueError, match=why):
        await call(engine)
    await engine.generate("one", GREEDY)
    assert not said(simulation, Sleep)


@pytest.mark.parametrize("mode", MODES)
async def test_sleep_while_the_worker_restarts(autojump_clock, simulated, mode):
    """A replay that waits for the worker ends, finishes or is kept, and nothing hangs."""
    engine, simulation = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as stream:
        await anext(stream)
        simulation.worker.kill()
        while engine.state is not Power.RESTARTING:
            await engine.runtime.gate.changed()
        await engine.sleep(mode=mode)
        assert engine.state is Power.ASLEEP
        await engine.check_invariants()
        await engine.wake()
        completion = await stream.result()
        assert (completion.cause is Cause.SLEEP) == (mode == "abort")


async def test_a_worker_that_dies_on_the_way_has_slept(autojump_clock, simulated):
    """Its memory is given back, which is what was asked for."""
    engine, simulation = simulated
    async with trio.open_nursery() as nursery, engine.open_session() as session:
        async with session.generate("one", LONG) as stream:
            await anext(stream)
            simulation.worker.stall()
            nursery.start_soon(functools.partial(engine.sleep, mode="keep"))
            await wait_all_tasks_blocked()
            simulation.worker.kill()
            while engine.state is not Power.ASLEEP:
                await engine.runtime.gate.changed()
            await engine.wake()
            assert list((await stream.result()).token_ids) == reference(engine, "one", LONG)


async def test_a_drain_or_a_close_ends_a_change(autojump_clock):
    for end in ("drain", "close"):
        failures = []
        async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:

            async def try_(call, failures=failures):
                with pytest.raises(TransitionFailed) as caught:
                    await call()
                failures.append(str(caught.value))

            simulation.worker.stall(20)
            async with engine.open_session() as session, session.generate("one", LONG):
                calls = (
                    functools.partial(engine.sleep, mode="keep"),
                    engine.wake,
                    functools.partial(engine.update_weights, "x"),
                )
                for call in calls:  # in this order
                    nursery.start_soon(try_, call)
                    await wait_all_tasks_blocked()
                if end == "close":
                    engine.close()
                else:
                    assert not await engine.drain(1)
        assert len(failures) == 3, failures


async def test_nothing_is_changed_before_it_is_loaded_or_when_it_drains(autojump_clock, simulated):
    engine, _ = simulated
    assert await engine.drain()
    for call in (engine.sleep, engine.wake, functools.partial(engine.update_weights, "x")):
        with pytest.raises(TransitionFailed, match="draining"):
            await call()


async def test_the_states_are_told(autojump_clock, simulated):
    engine, _ = simulated
    with engine.states() as states:
        assert (await anext(states)).power is Power.AWAKE
        await engine.sleep(2)
        await engine.wake(["kv_cache"])
        await engine.wake()
        told = [await anext(states) for _ in range(6)]
    assert [state.power.value for state in told] == ["falling_asleep", "asleep", "waking", "asleep", "waking", "awake"]
    assert [state.level for state in told] == [None, 2, 2, 2, 2, None]
    assert [len(state.asleep) for state in told] == [0, 2, 2, 1, 1, 0]
