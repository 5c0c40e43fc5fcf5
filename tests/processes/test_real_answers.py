"""The whole way on the real model, in float32: conversations, seeds and the prefix cache give the tokens they must."""

import itertools

import pytest
import trio

from trioengine import EngineConfig, SamplingParams, open_engine
from trioengine.core.types import FinishReason

PATIENCE = 300  # seconds; a guard against hanging
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.fixture
def config(smollm2):
    """One thread: two that wait for each other are many times slower beside whatever else the machine does."""
    model = str(smollm2)
    return EngineConfig(model=model, dtype="float32", kv_cache_memory=256 << 20, max_model_len=1024, num_threads=1)


async def test_conversations_seeds_and_one_shots(config):
    """One engine for all of it: a start takes seconds."""
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine:
            await turns_are_one_rendering(engine)
            await an_aborted_turn_leaves_no_trace(engine)
            await seeds_repeat_alone_and_in_a_batch(engine)
            await engine.check_invariants()


async def turns_are_one_rendering(engine):
    """Answers that ended by their end token, by length and by a stop string, closed by the template."""
    messages, cached = [], []
    async with engine.open_session() as session:
        for question, params in [
            ("What is the capital of France?", GREEDY),
            ("Tell me about it.", SamplingParams(max_tokens=12, temperature=0)),
            ("Name three of its rivers.", SamplingParams(max_tokens=24, temperature=0, stop=".")),
            ("Which of them is the longest?", GREEDY),
        ]:
            async with session.generate(question, params) as generation:
                answer = await generation.result()
            messages.append({"role": "user", "content": question})
            prompt = engine.tokenizer.apply_chat_template(messages)
            alone = await engine.generate(prompt, params)
            assert answer.token_ids == alone.token_ids
            assert answer.usage.prompt_tokens == len(prompt)
            cached.append((answer.usage.cached_tokens, (answer.usage.prompt_tokens + len(answer.token_ids) - 1)))
            messages.append({"role": "assistant", "content": answer.text})
    assert session.history == messages
    for (_, held), (found, _) in itertools.pairwise(cached):
        assert found >= held // 16 * 16 - 16  # a stop string may have cut the last token of what is held


async def an_aborted_turn_leaves_no_trace(engine):
    async with engine.open_session() as session:
        async with session.generate("My favourite colour is green.", GREEDY) as generation:
            await generation.result()
        before = session.history
        async with session.generate("Forget it, it is red.", SamplingParams(max_tokens=200, ignore_eos=True)) as gone:
            await anext(gone)
            gone.abort()
            assert (await gone.result()).finish_reason is FinishReason.ABORT
        assert session.history == before
        async with session.generate("What is my favourite colour?", GREEDY) as generation:
            answer = await generation.result()
    question = {"role": "user", "content": "What is my favourite colour?"}
    alone = await engine.generate([*before, question], GREEDY)
    assert answer.token_ids == alone.token_ids


async def seeds_repeat_alone_and_in_a_batch(engine):
    async def ask(number, answers):
        params = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.95, top_k=50, seed=number)
        answers[number] = (await engine.generate(f"Tell me something about {number}.", params)).token_ids

    alone: dict = {}
    for number in range(4):
        await ask(number, alone)
    for _ in range(2):
        together: dict = {}
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(ask, number, together)
        assert {number: together[number] for number in alone} == alone
    assert len(set(together.values())) == 16
