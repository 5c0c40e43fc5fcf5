"""What an observer is told, and what the statistics count: exact, under MockClock."""

from dataclasses import dataclass, field

import pytest
import trio
from helpers.expectations import FAILING, everything_is_given_back

from trioengine import EngineError, SamplingParams, TimedOut, WorkerLost
from trioengine.actors.observer import FinishedRequest, Observer
from trioengine.core.types import Cause, FinishReason
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.worker.scheduling.sequence import Limits

STEP = 0.02
TEN = SamplingParams(max_tokens=10, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PROMPT = list(range(1, 21))


@dataclass
class Notes(Observer):
    """Everything that was told, in order."""

    steps: list = field(default_factory=list)
    first: list = field(default_factory=list)
    usages: list = field(default_factory=list)
    gaps: list = field(default_factory=list)
    finished: list = field(default_factory=list)
    stopped: list = field(default_factory=list)
    aborts: list = field(default_factory=list)

    def step(self, num_tokens):
        self.steps.append(num_tokens)

    def first_token(self, seconds, usage):
        self.first.append(seconds)
        self.usages.append(usage)

    def next_tokens(self, gaps):
        self.gaps.extend(gaps)

    def request_finished(self, request):
        self.finished.append(request)

    def session_stopped(self, seconds):
        self.stopped.append(seconds)

    def all_aborted(self, cause):
        self.aborts.append(cause)


@pytest.fixture
async def observed(autojump_clock):
    async with simulated_engine(behaviours=[Behaviour(step_time=STEP)]) as (engine, simulation):
        notes = Notes()
        engine.observers.append(notes)
        yield engine, simulation, notes
        await everything_is_given_back(engine, simulation)


async def ask(session, prompt=PROMPT, params=TEN, **options):
    async with session.generate(prompt, params, **options) as generation:
        return await generation.result()


async def test_one_request_that_finishes(autojump_clock, observed):
    engine, _, notes = observed
    async with engine.open_session() as session:
        await ask(session)
        assert (notes.steps, notes.stopped) == ([20] + [1] * 9, [])
    await session.ended()
    assert (notes.first, notes.gaps) == (pytest.approx([STEP]), pytest.approx([STEP] * 9))
    assert [(usage.prompt_tokens, usage.cached_tokens) for usage in notes.usages] == [(20, 0)]
    assert notes.finished == [FinishedRequest(pytest.approx(10 * STEP), pytest.approx(9 * STEP), 20, 10)]
    assert notes.stopped == [0]
    statistics = engine.statistics()
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (20, 10)


async def test_the_gaps_of_a_step_come_together_and_before_an_end(autojump_clock, observed):
    engine, _, _ = observed
    events = []

    class Order(Observer):
        def next_tokens(self, gaps):
            events.append(("gaps", len(gaps)))

        def request_finished(self, request):
            events.append(("finished", request.generation_tokens))

    engine.observers.append(Order())
    async with engine.open_session() as one, engine.open_session() as other, trio.open_nursery() as nursery:
        for session, prompt in ((one, [1] * 10), (other, [2] * 10)):
            nursery.start_soon(ask, session, prompt)
    assert events == [*[("gaps", 2)] * 9, ("finished", 10), ("finished", 10)]


async def test_a_crash_of_another_session_changes_no_order(autojump_clock, observed):
    engine, _, _ = observed
    events = []

    class Order(Observer):
        def next_tokens(self, gaps):
            events.append("gaps")

        def request_finished(self, request):
            events.append("finished")

    engine.observers.append(Order())
    async with engine.open_session() as one, engine.open_session() as other, one.generate(PROMPT, TEN) as sound:
        async with other.generate([2] * 20, LONG) as broken:
            while sound._state.num_tokens < 9:
                await anext(sound)
            broken._state.output = None  # its next row crashes
            assert len((await sound.result()).token_ids) == 10
            with pytest.raises(EngineError, match="crashed"):
                await broken.result()
    assert events == [*["gaps"] * 9, "finished"]


async def test_a_long_prompt_is_several_steps(autojump_clock, observed):
    """Those that only compute a part of it are told, too."""
    engine, _, notes = observed
    async with engine.open_session() as session:
        await ask(session, [1] * 150)
    assert notes.steps == [64, 64, 22] + [1] * 9
    assert notes.first == pytest.approx([3 * STEP])
    assert notes.usages[0].prefill_time == pytest.approx(2 * STEP)  # the simulated worker computes at the end of a step


async def test_a_stop_string_ends_the_answer_before_the_worker_hears_of_it(autojump_clock, observed):
    """The time until then counts; what the worker still computes for it is in the steps alone."""
    engine, _, notes = observed
    async with engine.open_session() as session:
        stopped = await ask(session, PROMPT, SamplingParams(max_tokens=400, ignore_eos=True, stop=(" ",)))
    await session.ended()
    length = len(stopped.token_ids)
    assert stopped.finish_reason is FinishReason.STOP
    assert 1 < length < 400
    assert notes.finished == [
        FinishedRequest(pytest.approx(length * STEP), pytest.approx((length - 1) * STEP), 20, length)
    ]
    assert notes.gaps == pytest.approx([STEP] * (length - 1))
    assert len(notes.steps) == engine.statistics().generation_tokens == length + 1
    assert notes.stopped == pytest.approx([STEP, 0])  # the row of the STOP, which comes after a step, and the END


async def test_the_beginning_is_when_the_generation_is_entered(autojump_clock, observed):
    engine, _, notes = observed
    async with engine.open_session() as session:
        generation = session.generate(PROMPT, TEN)
        await trio.sleep(1)
        async with generation:
            await generation.result()
    assert notes.first == pytest.approx([STEP])


async def test_aborts_are_counted_by_their_cause(autojump_clock, observed):
    engine, _, notes = observed
    async with engine.open_session() as session:
        with pytest.raises(TimedOut):
            await ask(session, PROMPT, LONG, timeout=1)
        async with session.generate(PROMPT, LONG) as generation:
            await anext(generation)
            generation.abort()
        async with session.generate(PROMPT, LONG) as generation:
            await anext(generation)
            engine.abort_all()
    async with engine.open_session() as session, session.generate(PROMPT, LONG):
        session.end(Cause.DISCONNECT)
    await session.ended()
    statistics = engine.statistics()
    expected = {Cause.TIMEOUT: 1, Cause.CLIENT: 1, Cause.ABORT_ALL: 1, Cause.DISCONNECT: 1}
    assert {cause: count for cause, count in statistics.abort_causes.items() if count} == expected
    assert statistics.finish_reasons[FinishReason.ABORT] == statistics.aborted == 4
    assert notes.finished == []
    assert notes.first == pytest.approx([STEP] * 3)


async def test_a_stop_is_timed_until_the_worker_lets_go(autojump_clock, observed):
    """In the middle of a step; the END of an idle session is not waited for."""
    engine, _, notes = observed
    async with engine.open_session() as session:
        async with session.generate(PROMPT, LONG) as generation:
            await anext(generation)
            await trio.sleep(STEP / 4)
            generation.abort()
        assert notes.stopped == pytest.approx([STEP * 3 / 4])
    await session.ended()
    assert notes.stopped == pytest.approx([STEP * 3 / 4, 0])


async def test_an_end_after_a_stop_is_one_time(autojump_clock, observed):
    engine, _, notes = observed
    async with engine.open_session() as session:
        async with session.generate(PROMPT, LONG) as generation:
            await anext(generation)
            await trio.sleep(STEP / 4)
            generation.abort()
            await trio.sleep(STEP / 4)
            session.end()
    await session.ended()
    assert notes.stopped == pytest.approx([STEP * 3 / 4])


async def test_a_session_that_the_worker_never_had(autojump_clock, observed):
    engine, _, notes = observed
    async with engine.open_session():
        pass
    assert notes.stopped == []


async def test_a_worker_that_dies_lets_go(autojump_clock):
    async with simulated_engine() as (engine, simulation):
        notes = Notes()
        engine.observers.append(notes)
        async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
            await anext(generation)
            simulation.worker.hang()
            generation.abort()
            await trio.sleep(1)
            simulation.worker.kill()
            assert (await generation.result()).finish_reason is FinishReason.ABORT
        assert notes.stopped == pytest.approx([1], abs=0.3)  # and what it takes to read its last words
        await engine.ready()
        await everything_is_given_back(engine, simulation)


async def test_counters_never_go_down(autojump_clock):
    """Over three incarnations: with preemptions, prefix hits, and one that dies before it has said anything."""
    limits = Limits(
        vocab_size=259, max_model_len=64, kv_blocks_total=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=64
    )
    names = ("preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens")
    async with simulated_engine(limits=limits) as (engine, simulation):
        seen = []
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for start in (1, 2):
                    params = SamplingParams(max_tokens=30, ignore_eos=True)
                    nursery.start_soon(engine.generate, [start] * 8, params)
            for _ in range(2):
                await engine.generate([7] * 9, SamplingParams(max_tokens=2, ignore_eos=True))
            statistics = engine.statistics()
            worker = simulation.worker.core.statistics()
            seen.append({name: getattr(statistics, name) for name in names})
            assert worker.num_preemptions > 0
            assert worker.prefix_cache_hits > 0
            simulation.worker.kill()
            await lost(engine)
            assert {name: getattr(engine.statistics(), name) for name in names} == seen[-1]
            simulation.worker.kill()
            await lost(engine)
        assert seen[1] == {name: 2 * count for name, count in seen[0].items()}
        assert (seen[0]["prompt_tokens"], seen[0]["generation_tokens"]) == (8 + 8 + 9 + 9, 30 + 30 + 2 + 2)
        assert seen[0]["preemptions"] == worker.num_preemptions
        assert seen[0]["prefix_cache_queries"] == worker.prefix_cache_queries
        assert seen[0]["prefix_cache_hits"] == worker.prefix_cache_hits


async def lost(engine):
    """Until the worker is known to be dead and the next one is there."""
    incarnation = engine.statistics().incarnation
    while engine.statistics().incarnation == incarnation:
        await engine.runtime.gate.changed()
    await engine.ready()


async def test_requests_that_die_with_the_worker_are_errors(autojump_clock):
    async with simulated_engine(FAILING) as (engine, simulation):
        async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
            await anext(generation)
            simulation.worker.kill()
            with pytest.raises(WorkerLost):
                await generation.result()
        assert engine.statistics().finish_reasons[FinishReason.ERROR] == engine.statistics().failed == 1


async def test_blocks_of_a_session_that_ends_are_free_at_once(autojump_clock, observed):
    """Also where no step follows that would say so."""
    engine, _, _ = observed
    async with engine.open_session() as session, session.generate(PROMPT, LONG) as generation:
        await anext(generation)
        session.end(Cause.DISCONNECT)
    await session.ended()
    statistics = engine.statistics()
    assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total


async def test_all_requests_are_aborted(autojump_clock, observed):
    """Also if there is none."""
    engine, _, notes = observed
    engine.abort_all()
    async with engine.open_session() as session, session.generate(PROMPT, LONG):
        assert engine.abort_all(Cause.SLEEP) == 1
    assert notes.aborts == [Cause.ABORT_ALL, Cause.SLEEP]
