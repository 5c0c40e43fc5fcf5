"""Answers with speculation: the same as without, however their rows are cut, and whoever asked for it."""

from itertools import accumulate

import pytest

from trioengine import EngineConfig, InvalidConfig, RequestRejected, SamplingParams
from trioengine.testing import simulated_engine
from trioengine.testing.simulation import DEFAULT_LIMITS

LONG = {"max_tokens": 60, "ignore_eos": True}
HOT = {"temperature": 1.5, "seed": 7}


async def ask(engine, drafted, **options):
    params = SamplingParams(**{**LONG, **options}, num_speculative_tokens=drafted)
    return await engine.generate("hello", params)


def counted(completion):
    usage = completion.usage
    return (
        completion.text,
        completion.token_ids,
        completion.logprobs,
        completion.finish_reason,
        completion.stop_reason,
        (usage.prompt_tokens, usage.completion_tokens),
    )


async def rows_of(engine, drafted):
    """How many tokens each row of an answer has."""
    params = SamplingParams(**LONG, num_speculative_tokens=drafted)
    async with engine.open_session() as session, session.generate("hello", params) as generation:
        return [len(chunk.token_ids) async for chunk in generation]


async def test_several_tokens_come_at_once(autojump_clock, simulated):
    engine, _ = simulated
    assert await rows_of(engine, 0) == [1] * 60
    rows = await rows_of(engine, 8)
    assert sum(rows) == 60 and len(rows) < 45


@pytest.mark.parametrize("options", [{}, HOT, {"logprobs": 2}, {"ignore_eos": False}, {"max_tokens": 7}])
async def test_the_answer_is_the_same(autojump_clock, simulated, options):
    engine, _ = simulated
    plain = counted(await ask(engine, 0, **options))
    for drafted in (1, 3, 15):
        assert counted(await ask(engine, drafted, **options)) == plain


@pytest.mark.parametrize("min_tokens", [0, 20])
async def test_stop_strings_are_found_in_every_row(autojump_clock, simulated, min_tokens):
    engine, _ = simulated
    text = (await ask(engine, 0)).text
    for place in range(0, 50, 3):
        options = {"stop": (text[place : place + 2],), "min_tokens": min_tokens}
        assert counted(await ask(engine, 15, **options)) == counted(await ask(engine, 0, **options))


@pytest.mark.parametrize("stop_at", [3, 8, 21])
async def test_a_turn_behind_an_answer_that_a_stop_string_ended(autojump_clock, simulated, stop_at):
    """The worker holds more of the answer than the conversation has."""
    engine, _ = simulated
    text = (await ask(engine, 0)).text
    answers = []
    for drafted in (0, 15):
        async with engine.open_session() as session:
            for stop in ((text[stop_at : stop_at + 2],), ()):
                params = SamplingParams(**LONG, stop=stop, num_speculative_tokens=drafted)
                async with session.generate("hello", params) as generation:
                    answers.append(counted(await generation.result()))
    assert answers[:2] == answers[2:]


async def cut(engine, cut_now, at):
    """Read an answer, and cut it once so many of its tokens have come."""
    params = SamplingParams(**LONG, num_speculative_tokens=8)
    async with engine.open_session() as session, session.generate("hello", params) as generation:
        num_tokens, is_cut = 0, False
        async for chunk in generation:
            num_tokens += len(chunk.token_ids)
            if not is_cut and num_tokens >= at:
                is_cut = True
                await cut_now()
        return await generation.result()


async def test_an_answer_goes_on_behind_each_of_its_rows(autojump_clock, simulated):
    """After a death, and after a sleep."""
    engine, simulation = simulated
    plain = counted(await ask(engine, 0))

    async def kill():
        simulation.worker.kill()

    async def nap():
        await engine.sleep(mode="keep")
        await engine.wake()

    for at in list(accumulate(await rows_of(engine, 8)))[:-1:3]:
        for cut_now, resumed in ((kill, 1), (nap, 0)):
            completion = await cut(engine, cut_now, at)
            assert counted(completion) == plain
            assert completion.resumed >= resumed


async def test_the_engine_has_a_default(autojump_clock):
    config = EngineConfig(model="toy", max_num_seqs=DEFAULT_LIMITS.max_num_seqs, num_speculative_tokens=8)
    async with simulated_engine(config) as (engine, _):
        params = SamplingParams(**LONG)
        plain = await ask(engine, 0)
        assert engine.statistics().draft_tokens == 0
        drafted = await engine.generate("hello", params)
        assert counted(drafted) == counted(plain)
        statistics = engine.statistics()
        assert 0 < statistics.accepted_tokens < statistics.draft_tokens


async def test_counts_of_lost_workers_stay(autojump_clock, simulated):
    engine, simulation = simulated
    await ask(engine, 8)
    before = engine.statistics()
    simulation.worker.kill()
    await ask(engine, 8)
    after = engine.statistics()
    assert after.draft_tokens > before.draft_tokens > 0
    assert after.accepted_tokens > before.accepted_tokens > 0


@pytest.mark.parametrize("value", [-1, 16, 1.5, True, "4"])
def test_bad_values_are_refused(value):
    with pytest.raises(RequestRejected) as rejected:
        SamplingParams(num_speculative_tokens=value)
    assert rejected.value.param == "num_speculative_tokens"
    with pytest.raises(InvalidConfig, match="num_speculative_tokens"):
        EngineConfig(num_speculative_tokens=value)
