"""A timeout raises TimedOut with what came until then, wherever the request stands."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import trio
from expectations import GREEDY, LONG, chat
from trio.testing import wait_all_tasks_blocked

from trioengine import EngineAsleep, EngineConfig, EngineOverloaded, SessionBusy, SessionEnded, TimedOut, open_engine
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


async def test_a_running_request(autojump_clock, simulated):
    """The deltas come first; the turn is taken back."""
    engine, _ = simulated
    async with engine.open_session() as session:
        generation, texts = session.generate("one", LONG, timeout=0.1), []
        with pytest.raises(TimedOut) as caught:
            async with generation:
                async for chunk in generation:
                    texts.append(chunk.text)
        assert caught.value.completion == generation.completion
        assert generation.completion.text == "".join(texts) != ""
        assert (generation.completion.finish_reason, generation.completion.cause) == (FinishReason.ABORT, Cause.TIMEOUT)
        assert session.history == []
        with pytest.raises(TimedOut) as again:
            await generation.result()
        assert again.value is not caught.value


async def test_a_running_request_whose_part_is_kept(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        with pytest.raises(TimedOut) as caught:
            await session.ask("one", LONG, timeout=0.1, keep_partial=True)
        assert session.history == [*chat("one"), {"role": "assistant", "content": caught.value.completion.text}]


async def test_a_one_shot(autojump_clock, simulated):
    engine, _ = simulated
    with pytest.raises(TimedOut) as caught:
        await engine.generate("one", LONG, timeout=0.1)
    assert caught.value.completion.text


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


async def test_a_request_in_line_is_over_when_it_is_refused(autojump_clock):
    async with simulated_engine(ONE_SLOT) as (engine, _), engine.open_session() as other:
        async with engine.open_session() as session, session.generate("one", LONG):
            generation = other.generate("two", GREEDY, timeout=0.1)
            with pytest.raises(TimedOut):
                async with generation:
                    raise AssertionError("it was not admitted")
            assert generation._state.settled.is_set()
            assert generation.completion.cause is Cause.TIMEOUT
        assert (await other.ask("again", GREEDY)).text


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


# ---- a worker that does not answer --------------------------------------------------------------------------------


@pytest.fixture
async def hung(autojump_clock, simulated):
    """An engine, and a function that stops its worker as SIGSTOP does, until it is replaced."""
    engine, simulation = simulated
    yield engine, simulation.worker.hang
    assert (await engine.generate("last", GREEDY, wait=True)).text


async def check_recovers(engine, session):
    """The timeout is one entry in the books, and the next request of the session waits for the next worker."""
    assert (await session.ask("again", GREEDY, wait=True)).text
    statistics = engine.statistics()
    assert (statistics.received, statistics.finished, statistics.aborted) == (2, 1, 1)
    assert statistics.abort_causes[Cause.TIMEOUT] == 1
    await engine.check_invariants()


@pytest.mark.parametrize("keep_partial", [False, True])
async def test_a_hung_worker_does_not_delay_the_timeout(autojump_clock, hung, keep_partial):
    engine, hang = hung
    async with engine.open_session() as session:
        before = trio.current_time()
        with pytest.raises(TimedOut) as caught:
            async with session.generate("one", LONG, timeout=2, keep_partial=keep_partial) as generation:
                await anext(generation)
                hang()
                await generation.result()
        assert trio.current_time() == before + 2
        assert (engine.statistics().running, engine.statistics().aborted) == (1, 0)  # its slot waits for the worker
        text = caught.value.completion.text
        assert text == generation.completion.text != ""
        history = [*chat("one"), {"role": "assistant", "content": text}] if keep_partial else []
        assert session.history == history
        await check_recovers(engine, session)
        assert session.history[: len(history)] == history
        assert caught.value.completion == generation.completion


async def test_a_hung_worker_does_not_delay_the_timeout_of_a_call(autojump_clock, hung):
    engine, hang = hung
    hang()
    before = trio.current_time()
    with pytest.raises(TimedOut) as caught:
        await engine.generate("one", LONG, timeout=2)
    assert trio.current_time() == before + 2
    check_empty(caught.value)
    async with engine.open_session() as session:
        await check_recovers(engine, session)


async def test_the_next_request_waits_for_the_worker_within_its_own_timeout(autojump_clock, hung):
    engine, hang = hung
    async with engine.open_session() as session:
        hang()
        for timeout in (2, 3):
            before = trio.current_time()
            with pytest.raises(TimedOut) as caught:
                await session.ask("one", LONG, timeout=timeout)
            assert trio.current_time() == before + timeout
            check_empty(caught.value)
        assert (await session.ask("again", GREEDY, wait=True)).text
        assert engine.statistics().abort_causes[Cause.TIMEOUT] == 2


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


async def test_leaving_waits_for_the_worker_until_the_deadline(autojump_clock, hung):
    engine, hang = hung
    async with engine.open_session() as session:
        before = trio.current_time()
        async with session.generate("one", LONG, timeout=2) as generation:
            await anext(generation)
            hang()
        assert trio.current_time() == before + 2
        assert generation.completion.cause is Cause.CLIENT


async def test_the_deadline_of_an_aborted_request_decides_by_the_first_cause(autojump_clock, hung):
    engine, hang = hung
    async with engine.open_session() as session:
        before = trio.current_time()
        async with session.generate("one", LONG, timeout=2) as generation:
            hang()
            generation.abort()
            assert (await generation.result()).cause is Cause.CLIENT
        assert trio.current_time() == before + 2


async def test_a_history_is_replaced_while_the_worker_hangs(autojump_clock, hung):
    engine, hang = hung
    async with engine.open_session() as session:
        hang()
        with pytest.raises(TimedOut):
            async with session.generate("one", LONG, timeout=2) as generation:
                with pytest.raises(SessionBusy):
                    session.replace_history([])
                await generation.result()
        history = [*chat("other"), {"role": "assistant", "content": "yes"}]
        session.replace_history(history)
        assert (await session.ask("again", GREEDY, wait=True)).text
        assert session.history[:-1] == [*history, *chat("again")]


async def test_a_session_that_ends_after_a_timeout_has_ended(autojump_clock, hung):
    engine, hang = hung
    async with engine.open_session() as session:
        hang()
        with pytest.raises(TimedOut):
            await session.ask("one", LONG, timeout=2)
    with pytest.raises(SessionEnded, match=r"the session has ended \(.*\): open another one"):
        session.replace_history([])
    with pytest.raises(SessionEnded):
        await session.ask("two", GREEDY)


async def test_a_timeout_names_its_seconds_and_how_far_the_call_came(autojump_clock):
    async with simulated_engine(ONE_SLOT) as (engine, simulation), engine.open_session() as session:
        with pytest.raises(TimedOut) as caught:
            await session.ask("one", LONG, timeout=0.25)
        came = len(caught.value.completion.text)
        assert (
            str(caught.value) == f"timed out after 0.25 s with {came} characters of the answer, which .completion holds"
        )
        async with session.generate("one", LONG):
            with pytest.raises(TimedOut) as caught:
                await engine.generate("two", GREEDY, timeout=0.5)
            slots = "all 1 request slots are taken (max_num_seqs 1 + max_num_queued_reqs 0)"
            assert str(caught.value) == f"timed out after 0.5 s while waiting: {slots}"
        simulation.worker.hang()
        with pytest.raises(TimedOut) as caught:
            await session.ask("one", LONG, timeout=2.5)
        assert str(caught.value) == "timed out after 2.5 s before any text"
