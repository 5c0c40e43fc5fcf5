"""Logprobs of prompts through the engine: in the first chunk and the completion, once, whatever happens meanwhile."""

import pytest
from helpers.expectations import generated

from trioengine import RequestRejected, SamplingParams
from trioengine.testing.toy_model import toy_answer, toy_prompt_logprobs

PROMPT = [97 + number % 26 for number in range(200)]
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)


async def test_a_prompt_is_scored_without_an_answer(autojump_clock, simulated):
    engine, _ = simulated
    expected = (None, *toy_prompt_logprobs(PROMPT, 2))
    for _ in range(2):  # the second time it lies in the prefix cache
        completion = await engine.generate(PROMPT, SCORE)
        assert completion.prompt_logprobs == expected
        assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), "length")
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (200, 0, 0)
    assert (await engine.generate([5], SCORE)).prompt_logprobs == (None,)


async def test_the_first_chunk_has_them(autojump_clock, simulated):
    params = SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=0)
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate(PROMPT, params) as generation:
            first, *rest = [chunk async for chunk in generation]
        assert first.prompt_logprobs == (None, *toy_prompt_logprobs(PROMPT, 0)) == generation.completion.prompt_logprobs
        assert all(chunk.prompt_logprobs is None for chunk in rest)
        assert list(generation.completion.token_ids) == toy_answer(PROMPT, 5, ignore_eos=True)
        async with session.generate([9], SCORE) as generation:  # after the turn before
            (chunk,) = [chunk async for chunk in generation]
        assert chunk.prompt_logprobs == generation.completion.prompt_logprobs
        assert len(chunk.prompt_logprobs) == generation.completion.usage.prompt_tokens == 206


@pytest.mark.parametrize("num_tokens", [0, 1, 20])
async def test_they_are_whole_after_a_death(autojump_clock, simulated, num_tokens):
    """Before the answer, where they are computed anew, and in it, where they are kept."""
    engine, simulation = simulated
    params = SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=1)
    async with engine.open_session() as session, session.generate(PROMPT, params) as generation:
        await generated(engine, num_tokens)
        simulation.worker.kill()
        chunks = [chunk async for chunk in generation]
    completion = generation.completion
    assert completion.resumed == 1
    assert completion.prompt_logprobs == (None, *toy_prompt_logprobs(PROMPT, 1))
    assert [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs] == [completion.prompt_logprobs]
    assert list(completion.token_ids) == toy_answer(PROMPT, 40, ignore_eos=True)


def test_an_answer_of_no_tokens_needs_them():
    with pytest.raises(RequestRejected, match="max_tokens must be at least 1 without prompt_logprobs, got 0"):
        SamplingParams(max_tokens=0)


async def test_a_prompt_that_fills_the_context(autojump_clock, simulated):
    """It may be scored, with and without a session; a longer one is refused, as is an answer behind it."""
    engine, _ = simulated
    limit = engine.limits.max_model_len
    prompt = [97 + number % 26 for number in range(limit)]
    expected = (None, *toy_prompt_logprobs(prompt, 2))
    assert (await engine.generate(prompt, SCORE)).prompt_logprobs == expected
    async with engine.open_session() as session:
        assert (await session.ask(prompt, SCORE)).prompt_logprobs == expected
    with pytest.raises(RequestRejected, match=f"{limit + 1} tokens"):
        await engine.generate([*prompt, 97], SCORE)
    with pytest.raises(RequestRejected, match="leave no room"):
        await engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=2))
