"""Answers, turn after turn: what comes out is what the model says, and what was said is kept."""

import dataclasses

import pytest
from helpers.expectations import GREEDY, LONG, chat, reference, said

from trioengine import RequestRejected, SamplingParams
from trioengine.core.lifecycle import Phase
from trioengine.core.messages import AddMessage
from trioengine.core.types import FinishReason
from trioengine.testing import toy_answer, toy_model
from trioengine.testing.toy_model import IM_END


async def test_a_stop_string_ends_the_answer_before_it(autojump_clock, simulated):
    engine, _ = simulated
    whole = engine.tokenizer.decode(reference(engine, [7, 7], LONG))
    stop = whole[20:23]
    async with engine.open_session() as session:
        params = SamplingParams(max_tokens=200, ignore_eos=True, stop=stop)
        async with session.generate([7, 7], params) as generation:
            chunks = [chunk async for chunk in generation]
            completion = generation.completion
        assert completion.finish_reason is FinishReason.STOP
        assert completion.text == whole[: whole.index(stop)] == "".join(chunk.text for chunk in chunks)
        assert engine.tokenizer.decode(completion.token_ids) == completion.text + stop
        assert session._state.phase is Phase.IDLE
    assert engine.statistics().finished == 1


async def test_logprobs_and_seeds_reach_the_worker(autojump_clock, simulated):
    engine, simulation = simulated
    await engine.generate([1], SamplingParams(max_tokens=1, seed=5))
    await engine.generate([1], SamplingParams(max_tokens=None))
    first, second = [message for message in simulation.worker.received if isinstance(message, AddMessage)]
    assert first.params.seed == 5
    assert second.params.seed is not None
    assert second.params.max_tokens == simulation.limits.max_model_len - 1


def test_the_toy_model_knows_its_end():
    assert toy_model().eos_token_ids[0] == IM_END


async def test_turns_are_one_rendering_and_the_earlier_ones_are_cached(autojump_clock, simulated):
    engine, simulation = simulated
    block = simulation.limits.block_size
    messages = []
    async with engine.open_session() as session:
        held = 0
        for turn in range(4):
            async with session.generate(f"turn {turn}", GREEDY) as generation:
                completion = await generation.result()
            messages += chat(f"turn {turn}")
            prompt = engine.tokenizer.apply_chat_template(messages)
            assert list(completion.token_ids) == toy_answer(prompt, 40)
            assert completion.usage.prompt_tokens == len(prompt)
            assert completion.usage.cached_tokens >= held // block * block
            held = len(prompt) + len(completion.token_ids) - 1
            messages.append({"role": "assistant", "content": completion.text})
        assert session.history == messages


async def test_a_turn_with_another_salt_is_computed_anew(autojump_clock, simulated):
    """The conversation goes on, and each answer is the model's; only turns with the same salt are found."""
    engine, simulation = simulated
    messages, cached = [], []
    async with engine.open_session() as session:
        for salt in ("mine", "mine", "yours", "", "mine"):
            async with session.generate("go on", dataclasses.replace(GREEDY, cache_salt=salt)) as generation:
                completion = await generation.result()
            messages += chat("go on")
            assert list(completion.token_ids) == toy_answer(engine.tokenizer.apply_chat_template(messages), 40)
            messages.append({"role": "assistant", "content": completion.text})
            cached.append(completion.usage.cached_tokens > 0)
    assert cached == [False, True, False, False, True]
    assert all(message.base > 0 for message in said(simulation, AddMessage)[1:])


async def test_a_resumed_request_keeps_its_salt(autojump_clock, simulated):
    engine, simulation = simulated
    salted = dataclasses.replace(LONG, cache_salt="mine")
    async with engine.open_session() as session, session.generate("one", salted) as generation:
        await anext(generation)
        simulation.worker.kill()
        await generation.result()
    first, second = said(simulation, AddMessage)
    assert (first.num_output, second.num_output > 0) == (0, True)
    assert first.params == second.params


async def test_a_turn_cut_by_length_is_closed_by_the_template(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate("one", SamplingParams(max_tokens=5, ignore_eos=True)) as generation:
            first = await generation.result()
        async with session.generate("two", GREEDY) as generation:
            second = await generation.result()
    assert first.finish_reason is FinishReason.LENGTH
    messages = [*chat("one"), {"role": "assistant", "content": first.text}, *chat("two")]
    prompt = engine.tokenizer.render(messages).replace(first.text, "\0")  # the answer's own ids are kept
    head, tail = prompt.split("\0")
    encode = engine.tokenizer.encode
    assert list(second.token_ids) == toy_answer([*encode(head), *first.token_ids, *encode(tail)], 40)


async def test_history_gives_the_same_prompt_again_after_ignore_eos(autojump_clock, simulated):
    """With an end token inside an answer, hidden or shown."""
    engine, _ = simulated
    prompt = next(text for text in "abcdefgh" if IM_END in reference(engine, text, LONG)[:-1])
    for skip in (True, False):
        params = SamplingParams(max_tokens=200, ignore_eos=True, skip_special_tokens=skip)
        async with engine.open_session() as session:
            async with session.generate(prompt, params) as generation:
                await generation.result()
            history = session.history
            async with session.generate("and?", GREEDY) as generation:
                following = await generation.result()
        async with engine.open_session(history=history) as session:
            async with session.generate("and?", GREEDY) as generation:
                again = await generation.result()
        assert following.usage.prompt_tokens == again.usage.prompt_tokens
        assert (following.token_ids, following.text) == (again.token_ids, again.text)


async def test_raw_sessions_and_chats_do_not_mix(autojump_clock, simulated):
    engine, _ = simulated
    async with engine.open_session() as session:
        async with session.generate([1, 2], SamplingParams(max_tokens=5, ignore_eos=True)) as generation:
            first = await generation.result()
        with pytest.raises(RequestRejected, match="raw token ids"):
            async with session.generate("chat"):
                pass
        async with session.generate([3], GREEDY) as generation:
            second = await generation.result()
        assert list(second.token_ids) == toy_answer([1, 2, *first.token_ids, 3], 40)
