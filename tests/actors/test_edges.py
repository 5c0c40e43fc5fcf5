"""The edges: spawning that fails, exceptions that must come out as they were."""

import asyncio

import pytest
import trio
from helpers.expectations import FAILING, GREEDY, LONG, reference
from trio.testing import wait_all_tasks_blocked

from trioengine import (
    EngineClosed,
    EngineConfig,
    RequestRejected,
    SamplingParams,
    TimedOut,
    WorkerLost,
    connect,
    open_engine,
)
from trioengine.core.lifecycle import Power
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import Simulation, simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.toy_model import IM_END


async def test_an_engine_by_its_models_name(autojump_clock):
    async with trio.open_nursery() as nursery:
        ports = Simulation(nursery).ports
        async with open_engine("toy", ports=ports, max_num_seqs=4, max_sessions=7) as engine:
            assert engine.config == EngineConfig(model="toy", max_num_seqs=4, max_sessions=7)
            assert list((await engine.generate("hello", GREEDY)).token_ids) == reference(engine, "hello")
        for wrong in ({"config": EngineConfig(), "max_sessions": 7}, {"max_session": 7}):
            with pytest.raises(TypeError):
                async with open_engine(ports=ports, **wrong):
                    pass


async def test_a_session_that_was_not_entered_has_no_history(autojump_clock):
    async with simulated_engine() as (engine, _):
        with pytest.raises(RuntimeError, match="not entered"):
            _ = engine.open_session().history


async def test_a_one_shot_waits_for_a_session_no_longer_than_its_timeout(autojump_clock):
    config = EngineConfig(model="toy", max_sessions=1)
    async with simulated_engine(config) as (engine, _), engine.open_session():
        began = trio.current_time()
        with pytest.raises(TimedOut):
            await engine.generate("x", wait=True, timeout=3)
        assert trio.current_time() - began == pytest.approx(3)


async def test_a_session_is_entered_by_one_task(autojump_clock):
    config = EngineConfig(model="toy", max_sessions=1)
    async with simulated_engine(config) as (engine, _), trio.open_nursery() as nursery:
        session = engine.open_session(wait=True)
        async with engine.open_session():
            nursery.start_soon(session.__aenter__)
            await wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="once"):
                await session.__aenter__()
        await wait_all_tasks_blocked()
        session.end()
        await session.ended()
        assert engine.statistics().sessions == 0


@pytest.mark.parametrize("keep_partial", [False, True])
async def test_an_answer_of_special_tokens_that_are_shown(autojump_clock, keep_partial):
    params = SamplingParams(max_tokens=40, ignore_eos=True, skip_special_tokens=False)
    async with simulated_engine() as (engine, _), engine.open_session() as session:
        number = 0
        while await first_token(engine, f"say {number}") != IM_END:
            number += 1
        async with session.generate(f"say {number}", params, keep_partial=keep_partial) as generation:
            assert (await anext(generation)).text.startswith("<|im_end|>")
            if not keep_partial:
                await generation.result()
        assert session.history[-1]["content"].startswith("<|im_end|>")
        async with session.generate("next", GREEDY) as generation:
            await generation.result()


async def first_token(engine, prompt):
    return (await engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))).token_ids[0]


async def test_long_parts_are_refused_before_tokenizing(autojump_clock):
    async with simulated_engine() as (engine, _), engine.open_session() as session:
        parts = [{"type": "text", "text": "x" * 100_000}]
        with pytest.raises(RequestRejected, match="at least"):
            async with session.generate([{"role": "user", "content": parts}]):
                pass


async def test_ready_does_not_wait_for_what_drains(autojump_clock):
    async with simulated_engine() as (engine, _):
        with pytest.raises(ValueError, match="from 0"):
            await engine.drain(-1)
        await engine.drain()
        with pytest.raises(EngineClosed, match="draining"):
            await engine.ready()


async def test_drain_is_bounded_though_the_worker_hangs(autojump_clock):
    async with simulated_engine() as (engine, simulation), engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            await anext(generation)
            simulation.worker.stall()
            began = trio.current_time()
            assert not await engine.drain(1)
            assert trio.current_time() - began <= 1 + engine.config.worker_shutdown_timeout
            simulation.worker.kill()


async def test_a_request_that_is_preparing_survives_a_restart_while_draining(autojump_clock):
    """It was admitted before the drain: with `wait` it runs on the next incarnation."""
    async with (
        simulated_engine(thread_passes=20, thread_threshold=0) as (engine, simulation),
        trio.open_nursery() as nursery,
    ):
        answers = []

        async def ask():
            answers.append(await engine.generate([3], SamplingParams(max_tokens=3, ignore_eos=True), wait=True))

        nursery.start_soon(ask)
        while not engine.statistics().preparing:
            await trio.lowlevel.checkpoint()
        simulation.worker.kill()
        while engine.statistics().power is Power.AWAKE:
            await trio.lowlevel.checkpoint()
        assert engine.statistics().preparing == 1
        assert await engine.drain()
    assert answers[0].finish_reason is FinishReason.LENGTH
    assert engine.statistics().incarnation == 2


async def test_the_end_of_the_stream_is_death(autojump_clock):
    async with simulated_engine(FAILING) as (engine, simulation), engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            await anext(generation)
            simulation.worker.close_pipe()
            began = trio.current_time()
            with pytest.raises(WorkerLost, match="closed its pipe"):
                await generation.result()
            assert trio.current_time() - began < 1


async def test_stop_strings_count_as_finished(autojump_clock):
    config = EngineConfig(model="toy", max_restarts=2, restart_delays=(0.0,))
    params = SamplingParams(max_tokens=200, ignore_eos=True, stop=" ")
    async with simulated_engine(config, behaviours=[Behaviour()]) as (engine, simulation):
        for _ in range(4):
            completion = await engine.generate("x", params, wait=True)
            assert completion.finish_reason is FinishReason.STOP
            lost = engine.statistics().incarnation
            simulation.worker.kill()
            while engine.statistics().incarnation == lost:
                await engine.runtime.gate.changed()


@pytest.mark.parametrize("exit_code", [-40, 3])
async def test_odd_ends_of_a_worker(autojump_clock, exit_code):
    async with simulated_engine(FAILING) as (engine, simulation), engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            simulation.worker.exit(exit_code)
            with pytest.raises(WorkerLost, match=r"signal 40|exit status 3"):
                await generation.result()


async def test_the_first_cause_of_an_abort_wins(autojump_clock):
    async with simulated_engine() as (engine, _), engine.open_session() as session:
        async with session.generate("one", LONG) as generation:
            await anext(generation)
            generation.abort()
            engine.abort_all()
            assert (await generation.result()).cause is Cause.CLIENT


async def test_exceptions_keep_their_context_and_groups_stay_groups(autojump_clock):
    with pytest.raises(ValueError, match="second") as caught:
        async with simulated_engine():
            try:
                raise KeyError("first")
            except KeyError:
                raise ValueError("second")  # noqa: B904
    assert isinstance(caught.value.__context__, KeyError)
    with pytest.raises(ExceptionGroup, match="mine"):
        async with simulated_engine():
            raise ExceptionGroup("mine", [ValueError("only one")])


async def test_each_worker_says_how_far_it_has_come_with_loading(autojump_clock):
    told = []
    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery, behaviours=[Behaviour(load_bytes=10)])
        engine_options = {"ports": simulation.ports, "on_load": lambda *progress: told.append(progress)}
        async with open_engine(EngineConfig(model="toy"), **engine_options) as engine:
            assert told == [(5, 10), (10, 10)]
            simulation.worker.exit(-9)
            await engine.runtime.gate.changed()
            await engine.ready()
            assert told == [(5, 10), (10, 10)] * 2


@pytest.mark.parametrize("opened", [open_engine, lambda: connect("http://localhost")], ids=["open_engine", "connect"])
def test_under_asyncio_it_says_that_it_runs_under_trio(opened):
    async def main():
        async with opened():
            pass

    with pytest.raises(RuntimeError, match=r"under trio .*; in a notebook or under asyncio use trioengine\.blocking$"):
        asyncio.run(main())
