"""The engine drains, closes, is cancelled, or gives up."""

import traceback
from dataclasses import replace

import pytest
import trio
from helpers.expectations import GREEDY, LONG, orders_are_kept
from trio.testing import wait_all_tasks_blocked

from trioengine import Engine, EngineClosed, EngineConfig, EngineOverloaded, ModelError, WorkerLost, open_engine
from trioengine.core.lifecycle import Power
from trioengine.core.messages import EndSession, Fatal, FatalCode
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import Simulation, simulated_engine
from trioengine.testing.simulated_worker import Behaviour


async def test_drain_lets_requests_finish_and_admits_none(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", GREEDY) as generation:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.drain)
            await wait_all_tasks_blocked()
            with pytest.raises(EngineClosed):
                await engine.generate("two")
            with pytest.raises(EngineClosed):
                async with engine.open_session():
                    pass
        assert generation.outcome.finish_reason is not FinishReason.ABORT
    assert engine.statistics().power is Power.DRAINING


async def test_drain_aborts_after_its_timeout(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session, session.generate("one", LONG) as generation:
        assert not await engine.drain(timeout=0.5)
        assert generation.completion.cause is Cause.SHUTDOWN


async def test_closing_the_engine_ends_the_search_for_its_model(autojump_clock):
    """A download may take for ever; no worker is started for an engine that is closed."""

    async def find_model(model, on_progress):
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery)
        engine = Engine(EngineConfig(model="toy"), ports=replace(simulation.ports, find_model=find_model))
        await nursery.start(engine.run)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.deadline = trio.current_time() + 1
        engine.close()
    assert not nursery.cancel_scope.cancelled_caught
    assert (engine.statistics().power, engine.statistics().incarnation) == (Power.CLOSED, 0)
    assert simulation.workers == []


async def test_closing_the_engine_ends_everything(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        session = engine.open_session()
        await session.__aenter__()
        generation = session.generate("one", LONG)
        await generation.__aenter__()
        await anext(generation)
    assert generation.completion.cause is Cause.SHUTDOWN
    assert session.end_cause is Cause.SHUTDOWN
    assert simulation.worker.reaped
    assert any(isinstance(message, EndSession) for message in simulation.worker.received)
    assert engine.statistics().sessions == 0
    with pytest.raises(EngineClosed):
        await engine.generate("two")
    orders_are_kept(simulation)


async def test_cancelling_the_engine_still_writes_the_ends(autojump_clock):
    with trio.CancelScope() as scope:
        async with simulated_engine() as (engine, simulation), trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(engine.generate, "one", LONG)
            await wait_all_tasks_blocked()
            scope.cancel()
            await trio.sleep_forever()
    assert sum(isinstance(message, EndSession) for message in simulation.worker.received) == 3
    assert simulation.worker.reaped


async def test_a_model_that_is_not_found_has_a_short_traceback():
    """The frames of the thread that has looked for it are no help."""
    with pytest.raises(ModelError, match=r"^unknown model 'toyy'") as caught:
        async with open_engine("toyy"):
            pass
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "open_engine"


async def test_a_worker_that_cannot_start_gives_the_reason(autojump_clock, caplog):
    """By an exception: the log does not say it again."""
    fatal = Fatal(FatalCode.MODEL, "x.gguf: architecture 'gpt5' is not supported", "Traceback")
    with pytest.raises(ModelError, match="gpt5"):
        async with simulated_engine(behaviours=[Behaviour(fatal=fatal)]):
            raise AssertionError("it never was ready")
    fatal = Fatal(FatalCode.MEMORY, "not enough memory", "Traceback of it")
    with pytest.raises(WorkerLost, match="not enough memory") as caught:
        async with simulated_engine(behaviours=[Behaviour(fatal=fatal)]):
            raise AssertionError("it never was ready")
    assert caught.value.traceback == "Traceback of it"
    assert not caplog.records


async def test_a_worker_that_makes_no_progress_while_loading(autojump_clock):
    config = EngineConfig(model="toy", startup_timeout=30)
    with pytest.raises(WorkerLost, match="no progress"):
        async with simulated_engine(config, behaviours=[Behaviour(load_time=1e6)]):
            raise AssertionError("it never was ready")


async def test_ten_deaths_without_a_finished_request(autojump_clock):
    dying = Behaviour(fatal=Fatal(FatalCode.INTERNAL, "bug", ""))
    with pytest.raises(WorkerLost, match="10 times"):
        async with simulated_engine(behaviours=[Behaviour(), dying]) as (_, simulation):
            simulation.worker.kill()
            await trio.sleep_forever()
    assert len(simulation.workers) == 10


async def test_the_engine_dies_for_good_while_others_knock(autojump_clock):
    """Whoever opens a session in any pass of the engine's end is refused with a typed error; one error comes out."""
    dying = Behaviour(fatal=Fatal(FatalCode.INTERNAL, "bug", ""))
    refusals = []

    async def knock(engine):
        while not refusals or not isinstance(refusals[-1], EngineClosed):
            try:
                async with engine.open_session() as session, session.generate("x", LONG) as generation:
                    await trio.lowlevel.checkpoint()
                    generation.abort()
            except (EngineOverloaded, EngineClosed, WorkerLost) as exc:
                refusals.append(exc)
                await trio.sleep(0.05)

    async with trio.open_nursery() as outside:
        with pytest.raises(WorkerLost, match="10 times"):
            async with simulated_engine(behaviours=[Behaviour(), dying]) as (engine, simulation):
                for _ in range(3):
                    outside.start_soon(knock, engine)
                simulation.worker.kill()
                await trio.sleep_forever()


async def test_a_body_that_fails_with_the_engine_gives_one_error(autojump_clock):
    dying = Behaviour(fatal=Fatal(FatalCode.INTERNAL, "bug", ""))
    with pytest.raises(WorkerLost, match="2 times"):
        async with simulated_engine(
            EngineConfig(model="toy", max_restarts=2, restart_delays=(0.0,)), behaviours=[Behaviour(), dying]
        ) as (engine, simulation):
            simulation.worker.kill()
            while True:
                await engine.runtime.gate.changed()
                if engine.runtime.gate.failure is not None:
                    raise WorkerLost("mine")


@pytest.mark.parametrize("takes", [0.4, 1e6])
async def test_a_worker_that_the_kernel_lets_die_late(autojump_clock, takes):
    """The engine's end waits a bounded time for the death, and blocks nobody."""
    ticks = []

    async def tick():
        while True:
            ticks.append(trio.current_time())
            await trio.sleep(0.1)

    async def die(worker):
        await trio.sleep(takes)
        worker.exit(-9)

    async with trio.open_nursery() as outside:
        with trio.CancelScope() as scope:
            async with simulated_engine() as (engine, simulation):
                worker = simulation.worker
                worker.hang()
                worker.kill = lambda: outside.start_soon(die, worker)
                began = trio.current_time()
                scope.cancel()
        outside.start_soon(tick)
        ended = trio.current_time() - began
        assert ended <= engine.config.worker_shutdown_timeout + 1.5
        assert worker.reaped
        assert engine.runtime.supervisor.last_loss.exit_code == (-9 if takes < 1 else None)
        outside.cancel_scope.cancel()
