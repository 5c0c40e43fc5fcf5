"""The log of a lost worker: its process, its requests, and the next step."""

import json
import logging
from contextlib import AsyncExitStack

import pytest
import trio
from helpers.expectations import FAILING, LONG

from trioengine import EngineConfig, WorkerLost
from trioengine.actors.supervisor import LOSS_FIELDS
from trioengine.cli.logs import JsonFormatter
from trioengine.testing import simulated_engine

BOUNDED = EngineConfig(model="toy", max_restarts=3, restart_delays=(0.0,))


@pytest.fixture
def losses(caplog):
    caplog.set_level(logging.WARNING, "trioengine")
    return lambda: [record for record in caplog.records if hasattr(record, "requests_resumed")]


async def until_restarted(engine):
    incarnation = engine.statistics().incarnation
    while engine.statistics().incarnation == incarnation or not engine.runtime.gate.is_awake:
        await engine.runtime.gate.changed()


def fields(record):
    return {name: getattr(record, name) for name in LOSS_FIELDS}


async def lose_with(engine, simulation, count):
    """The worker is killed in the middle of so many requests."""
    async with AsyncExitStack() as stack:
        for number in range(count):
            session = await stack.enter_async_context(engine.open_session())
            generation = await stack.enter_async_context(session.generate(f"{number}", LONG))
            await anext(generation)
        simulation.worker.kill()
        await until_restarted(engine)


@pytest.mark.parametrize(("config", "resumed", "failed"), [(BOUNDED, 3, 0), (FAILING, 0, 3)], ids=["resume", "fail"])
async def test_the_requests_of_a_lost_worker(autojump_clock, losses, config, resumed, failed):
    async with simulated_engine(config) as (engine, simulation):
        await lose_with(engine, simulation, 3)
        (record,) = losses()
        assert record.getMessage() == (
            f"the worker was lost: killed by SIGKILL (pid 1001); requests that go on: {resumed}, that fail: {failed}; "
            f"starting the next worker (death 1 of at most {engine.config.max_restarts} in a row)"
        )
        expected = (1001, resumed, failed, 1, engine.config.max_restarts)
        assert fields(record) == dict(zip(LOSS_FIELDS, expected, strict=True))
        assert json.loads(JsonFormatter().format(record))["requests_resumed"] == resumed


async def test_a_request_that_is_given_up(autojump_clock, losses):
    """The one that kills the worker fails alone, and costs no attempt."""
    async with simulated_engine(BOUNDED) as (engine, simulation):
        async with engine.open_session() as session, session.generate("one", LONG) as generation:
            simulation.poisoned[generation.request_id] = 1
            with pytest.raises(WorkerLost):
                await generation.result()
        assert [(record.requests_resumed, record.requests_failed, record.deaths) for record in losses()] == [
            (1, 0, 1),
            (1, 0, 2),
            (1, 0, 2),
            (0, 1, 2),
        ]
        for record in losses()[2:]:
            assert record.getMessage().endswith("; starting the next worker")


async def test_the_last_attempt(autojump_clock, losses):
    """Also of workers that could not be started, which have no pid."""
    with pytest.raises(WorkerLost, match="died 3 times"):
        async with simulated_engine(BOUNDED) as (engine, simulation):
            simulation.failing_starts = 1
            simulation.worker.kill()
            await until_restarted(engine)
            simulation.worker.kill()
            await trio.sleep_forever()
    steps = [(record.worker_pid, record.getMessage().rpartition("; ")[2]) for record in losses()]
    assert steps == [
        (1001, "starting the next worker (death 1 of at most 3 in a row)"),
        (None, "starting the next worker (death 2 of at most 3 in a row)"),
        (1002, "giving up after 3 deaths in a row"),
    ]
    assert losses()[1].getMessage().startswith("made not to start; requests")


async def test_requests_at_the_last_attempt_fail(autojump_clock, losses):
    """No worker will come for those that would go on."""
    with pytest.raises(WorkerLost, match="died 3 times"):
        async with simulated_engine(BOUNDED) as (engine, simulation), AsyncExitStack() as stack:
            session = await stack.enter_async_context(engine.open_session())
            generation = await stack.enter_async_context(session.generate("one", LONG))
            await anext(generation)
            simulation.failing_starts = 2
            simulation.worker.kill()
            await generation.wait_settled()
            with pytest.raises(WorkerLost):
                await generation.result()
            await trio.sleep_forever()
    assert [(record.requests_resumed, record.requests_failed) for record in losses()] == [(1, 0), (1, 0), (0, 1)]
    assert (
        losses()[-1].getMessage().endswith("; requests that go on: 0, that fail: 1; giving up after 3 deaths in a row")
    )


async def test_a_worker_that_is_lost_asleep(autojump_clock, losses):
    async with simulated_engine(BOUNDED) as (engine, simulation):
        await engine.sleep()
        simulation.worker.kill()
        await trio.sleep(1)
        (record,) = losses()
        assert record.getMessage().endswith("; the next worker starts when it is needed")
