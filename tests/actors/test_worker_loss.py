"""The worker dies, hangs or speaks nonsense: with on_worker_loss="fail" everyone is told; the next one takes over."""

import math
import traceback

import pytest
import trio
from helpers.expectations import FAILING, GREEDY, LONG, chat, everything_is_given_back
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineConfig, EngineOverloaded, TimedOut, WorkerLost
from trioengine.core.lifecycle import Power
from trioengine.core.types import Cause
from trioengine.testing import simulated_engine, toy_answer
from trioengine.testing.simulated_worker import Behaviour


async def test_the_worker_dies_and_everyone_is_told(autojump_clock):
    async with simulated_engine(FAILING) as (engine, simulation):
        async with engine.open_session() as session:
            async with session.generate("one", GREEDY) as generation:
                first = await generation.result()
            async with session.generate("two", LONG) as generation:
                await anext(generation)
                died = trio.current_time()
                simulation.worker.kill()
                with pytest.raises(WorkerLost) as caught:
                    await generation.result()
                assert trio.current_time() - died < 1
                assert caught.value.exit_code == -9
            assert [turn["content"] for turn in session.history] == ["one", first.text]
            with pytest.raises(EngineOverloaded, match="restarting") as caught:
                async with session.generate("three"):
                    pass
            assert caught.value.code == "restarting"
            async with session.generate("three", GREEDY, wait=True) as generation:
                third = await generation.result()
            prompt = engine.tokenizer.apply_chat_template([*session.history[:2], *chat("three")])
            assert list(third.token_ids) == toy_answer(prompt, 40)
        assert engine.statistics().incarnation == 2
        await everything_is_given_back(engine, simulation)


async def test_an_error_can_be_read_again_and_again(autojump_clock):
    """Each read raises an error of its own: equal, and with the traceback of that read alone."""
    async with simulated_engine(FAILING) as (engine, simulation), engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            simulation.worker.kill()
            errors = []
            for _ in range(3):
                for read in (generation.result, generation.__anext__):
                    with pytest.raises(WorkerLost) as caught:
                        await read()
                    errors.append(caught.value)
                with pytest.raises(WorkerLost) as caught:
                    _ = generation.completion
                errors.append(caught.value)
    assert len({id(error) for error in errors}) == len(errors)
    assert len({(str(error), error.exit_code) for error in errors}) == 1
    depths = [len(list(traceback.walk_tb(error.__traceback__))) for error in errors]
    assert depths == depths[:3] * 3


@pytest.mark.parametrize("fault", ["hang", "stall"])
async def test_a_worker_that_hangs_is_replaced(autojump_clock, fault):
    config = EngineConfig(model="toy", step_timeout=20, on_worker_loss="fail")
    async with simulated_engine(config) as (engine, simulation):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            await anext(generation)
            began = trio.current_time()
            getattr(simulation.worker, fault)()
            with pytest.raises(WorkerLost, match="no answer" if fault == "hang" else "one step"):
                await generation.result()
            bound = config.unresponsive_timeout if fault == "hang" else config.step_timeout
            assert trio.current_time() - began <= bound + config.ping_interval + 1
        await engine.generate("two", GREEDY, wait=True)
        await everything_is_given_back(engine, simulation)


async def test_a_pause_of_the_engine_is_not_the_workers(autojump_clock):
    """A process that was stopped (SIGSTOP, a frozen container) reads the answer that lies in the pipe."""
    async with simulated_engine() as (engine, simulation):
        autojump_clock.autojump_threshold = math.inf
        worker, config = simulation.worker, engine.config
        worker.to_engine.by_hand = True
        autojump_clock.jump(config.ping_interval)
        await wait_all_tasks_blocked()
        autojump_clock.jump(10 * config.unresponsive_timeout)
        await wait_all_tasks_blocked()
        worker.deliver()
        worker.to_engine.by_hand = False
        await wait_all_tasks_blocked()
        assert engine.statistics().incarnation == 1 and worker.is_alive
        worker.hang()
        for seconds in (config.ping_interval, config.unresponsive_timeout):
            autojump_clock.jump(seconds)
            await wait_all_tasks_blocked()
        assert not worker.is_alive
        autojump_clock.autojump_threshold = 0


async def test_a_pause_of_the_engine_is_not_a_slow_load(autojump_clock):
    config, behaviours = EngineConfig(model="toy", startup_timeout=20), [Behaviour(), Behaviour(load_time=30)]
    async with simulated_engine(config, behaviours=behaviours) as (engine, simulation):
        simulation.worker.kill()
        await trio.sleep(2.5 * config.ping_interval)
        assert simulation.worker.is_alive and engine.statistics().incarnation == 2
        autojump_clock.autojump_threshold = math.inf
        simulation.worker.to_engine.by_hand = True
        autojump_clock.jump(10 * config.startup_timeout)
        await wait_all_tasks_blocked()
        assert simulation.worker.is_alive
        simulation.worker.deliver()
        simulation.worker.to_engine.by_hand = False
        autojump_clock.autojump_threshold = 0
        await trio.sleep(60)
        await engine.generate("one", GREEDY)
        assert engine.statistics().incarnation == 2


async def test_a_worker_that_speaks_nonsense_is_replaced(autojump_clock):
    async with simulated_engine(FAILING) as (engine, simulation):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            simulation.worker.say(b"\xff" * 100)
            with pytest.raises(WorkerLost, match="protocol"):
                await generation.result()
        await engine.generate("two", GREEDY, wait=True)


async def test_a_request_is_aborted_while_its_worker_dies(autojump_clock):
    """Death in STOPPING is the abort's outcome."""
    async with simulated_engine() as (engine, simulation):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            await anext(generation)
            generation.abort()
            simulation.worker.kill()
            assert (await generation.result()).cause is Cause.CLIENT
        assert (engine.statistics().aborted, engine.statistics().failed) == (1, 0)


async def test_waiting_for_the_restart_has_a_limit(autojump_clock):
    async with simulated_engine(behaviours=[Behaviour(), Behaviour(load_time=50)]) as (engine, simulation):
        simulation.worker.kill()
        while engine.statistics().power is Power.AWAKE:
            await engine.runtime.gate.changed()
        with pytest.raises(TimedOut, match="restarting"):
            await engine.generate("x", wait=True, timeout=5)
        with pytest.raises(EngineOverloaded, match="no worker"):
            await engine.check_invariants()


async def test_an_audit_does_not_outlive_its_worker(autojump_clock):
    async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:

        async def audit():
            with pytest.raises(WorkerLost):
                await engine.check_invariants()

        simulation.worker.stall()
        nursery.start_soon(audit)
        await wait_all_tasks_blocked()
        simulation.worker.kill()
