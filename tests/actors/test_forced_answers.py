"""Answers with forced tokens, whose rows have several: stop strings, usage, turns, deaths and sleeps cut them anywhere.

A request that asks for logprobs gets every token from the sampler, and so is the reference.
"""

from itertools import accumulate

import pytest

from trioengine import Grammar, SamplingParams

PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "is_old": {"type": "boolean"}},
        "required": ["name", "is_old"],
        "additionalProperties": False,
    }
)
PREFIX = '{"name": "'


def params(**options):
    return SamplingParams(grammar=PERSON, **{"max_tokens": 200, **options})


async def ask(engine, **options):
    return await engine.generate("hello", params(**options))


def counted(completion):
    usage = completion.usage
    return (
        completion.text,
        completion.token_ids,
        completion.finish_reason,
        completion.stop_reason,
        (usage.prompt_tokens, usage.completion_tokens),
    )


async def chunks_of(engine, **options):
    async with engine.open_session() as session, session.generate("hello", params(**options)) as generation:
        return [chunk async for chunk in generation]


async def test_several_tokens_come_at_once(autojump_clock, simulated):
    engine, _ = simulated
    chunks = await chunks_of(engine)
    assert chunks[0].text == PREFIX and len(chunks[0].token_ids) == len(PREFIX)
    assert counted(await ask(engine)) == counted(await ask(engine, logprobs=0))


async def test_with_logprobs_each_token_has_its_own(autojump_clock, simulated):
    engine, _ = simulated
    chunks = await chunks_of(engine, logprobs=2)
    assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
    assert all(
        token_id in logprobs
        for chunk in chunks
        for token_id, logprobs in zip(chunk.token_ids, chunk.logprobs, strict=True)
    )


@pytest.mark.parametrize("min_tokens", [0, 12])
@pytest.mark.parametrize("stop", ["{", '"', "am", "name", ': "', "old", "}", '", "', "l", "e"])
async def test_stop_strings_in_forced_text(autojump_clock, simulated, stop, min_tokens):
    engine, _ = simulated
    options = {"stop": (stop,), "min_tokens": min_tokens}
    assert counted(await ask(engine, **options)) == counted(await ask(engine, logprobs=0, **options))


@pytest.mark.parametrize("max_tokens", range(1, 40, 2))
async def test_a_turn_behind_a_cut_answer(autojump_clock, simulated, max_tokens):
    """Behind a stop string the worker holds more of the answer than the conversation has."""
    engine, _ = simulated
    answers = []
    for logprobs in (None, 0):
        async with engine.open_session() as session:
            for stop in (("is",), ("}",)):
                options = {"max_tokens": max_tokens, "stop": stop, "logprobs": logprobs}
                async with session.generate("hello", params(**options)) as generation:
                    answers.append(counted(await generation.result()))
    assert answers[:2] == answers[2:]


async def ends_of_rows(engine):
    """How long the text is behind each row but the last one."""
    lengths = [len(chunk.text) for chunk in await chunks_of(engine)]
    return list(accumulate(lengths))[:-1]


async def read(engine, cut, *, until_text):
    """Read an answer, and cut it once so much of its text has come."""
    async with engine.open_session() as session, session.generate("hello", params()) as generation:
        text, is_cut = "", False
        async for chunk in generation:
            text += chunk.text
            if not is_cut and len(text) >= until_text:
                is_cut = True
                await cut()
        return text, await generation.result()


async def test_an_answer_goes_on_behind_each_of_its_rows_after_a_death(autojump_clock, simulated):
    engine, simulation = simulated
    whole = await ask(engine)

    async def kill():
        simulation.worker.kill()

    for until_text in await ends_of_rows(engine):
        text, completion = await read(engine, kill, until_text=until_text)
        assert text == whole.text and counted(completion) == counted(whole)
        assert completion.resumed == 1


async def test_an_answer_goes_on_behind_each_of_its_rows_after_a_sleep(autojump_clock, simulated):
    engine, _ = simulated
    whole = await ask(engine)

    async def nap():
        await engine.sleep(mode="keep")
        await engine.wake()

    for until_text in await ends_of_rows(engine):
        text, completion = await read(engine, nap, until_text=until_text)
        assert text == whole.text and counted(completion) == counted(whole)
