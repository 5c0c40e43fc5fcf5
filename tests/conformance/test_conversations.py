"""Answers and conversations: streamed and whole, with a history, turn after turn."""

import inspect

import pytest
import trio
from helpers.sides import GREEDY, LONG, SHORT, assistant, user
from trio.testing import wait_all_tasks_blocked

from trioengine import Client, Engine, SamplingParams, Session
from trioengine.client.session import Session as RemoteSession
from trioengine.core.types import FinishReason
from trioengine.testing.toy_model import IM_END


@pytest.mark.parametrize(
    ("of_engine", "of_client"),
    [
        (Engine.open_session, Client.open_session),
        (Engine.generate, Client.generate),
        (Engine.abort, Client.abort),
        (Session.generate, RemoteSession.generate),
        (Session.ask, RemoteSession.ask),
    ],
)
def test_an_engine_and_a_client_take_the_same_arguments(of_engine, of_client):
    """Under the same names, with the same defaults."""
    of_engine, of_client = inspect.signature(of_engine).parameters, inspect.signature(of_client).parameters
    assert [(each.name, each.kind, each.default) for each in of_engine.values()] == [
        (each.name, each.kind, each.default) for each in of_client.values()
    ]


async def test_an_answer_streams(autojump_clock, side):
    ids = side.answer_ids([user("hello")])
    async with side.api.open_session(label="mine") as session, session.generate("hello", GREEDY) as generation:
        chunks = [chunk async for chunk in generation]
        completion = generation.completion
    text = "".join(chunk.text for chunk in chunks)
    assert text == completion.text == side.answer([user("hello")])
    assert len(chunks) > 1
    expected_ids = ids if side.name == "engine" else []  # the server does not send them
    assert [token for chunk in chunks for token in chunk.token_ids] == list(completion.token_ids) == expected_ids
    assert {chunk.logprobs for chunk in chunks} == {None}
    reason = FinishReason.STOP if ids[-1] == IM_END else FinishReason.LENGTH
    assert (completion.finish_reason, completion.cause) == (reason, None)
    assert completion.usage.completion_tokens == len(ids)
    assert completion.request_id == generation.request_id
    assert session.history == [user("hello"), assistant(text)]
    assert "'mine'" in repr(session)
    assert max(len(repr(session)), len(repr(generation))) < 80


async def test_a_slow_reader_gets_one_merged_chunk(autojump_clock, side, session):
    async with session.generate("hello", LONG) as generation:
        await side.until_finished(1)
        await wait_all_tasks_blocked()
        chunks = [chunk async for chunk in generation]
    assert [chunk.text for chunk in chunks] == [side.answer([user("hello")], LONG)]
    assert "length" in repr(generation)


async def test_a_whole_answer_takes_sampling_parameters_as_keywords(autojump_clock, side, session):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    expected = side.answer([user("hello")], params)
    completion = await session.ask("hello", GREEDY, max_tokens=5, ignore_eos=True)
    assert (completion.text, completion.finish_reason) == (expected, FinishReason.LENGTH)
    assert completion.usage.completion_tokens == 5
    assert session.history == [user("hello"), assistant(completion.text)]
    assert (await side.api.generate("hello", temperature=0, max_tokens=5, ignore_eos=True)).text == expected
    async with session.generate("more", GREEDY, max_tokens=3, ignore_eos=True) as generation:
        assert generation.params == SHORT
        assert (await generation.result()).usage.completion_tokens == 3


async def test_every_parameter_counts(autojump_clock, side):
    """The answer ends before its stop string, and the others change nothing."""
    expected = side.answer([user("hello")])
    completion = await side.api.generate(
        "hello", GREEDY, stop=expected[3:5], logit_bias={0: -1}, stop_token_ids=(5,), seed=1, top_p=0.5, top_k=7
    )
    assert (completion.text, completion.finish_reason) == (expected[:3], FinishReason.STOP)


async def test_many_calls_at_once_have_each_their_own_answer(autojump_clock, side):
    texts = {}

    async def ask(prompt):
        texts[prompt] = (await side.api.generate(prompt, GREEDY, wait=True)).text

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(ask, f"question {number}")
    assert texts == {f"question {number}": side.answer([user(f"question {number}")]) for number in range(30)}


async def test_a_conversation_goes_on(autojump_clock, side, session):
    first = await session.ask("hello", GREEDY)
    second = await session.ask([user("and"), user("then?")], GREEDY)
    history = [user("hello"), assistant(first.text), user("and"), user("then?")]
    assert second.text == side.answer(history)
    assert session.history == [*history, assistant(second.text)]
    assert second.usage.cached_tokens > 0
    assert side.engine.statistics().sessions == 1


async def test_a_history_can_be_given_and_replaced(autojump_clock, side):
    history = [{"role": "system", "content": "be brief"}, user("hello"), assistant("hi")]
    async with side.api.open_session(history=history) as session:
        assert session.history == history
        more = [{"role": "user", "content": [{"type": "text", "text": "more"}]}]
        assert (await session.ask(more, GREEDY)).text == side.answer([*history, user("more")])
        session.replace_history([user("other")])
        assert session.history == [user("other")]
        assert (await session.ask("more", GREEDY)).text == side.answer([user("other"), user("more")])


async def test_a_turn_cut_by_its_length_is_part_of_the_next_prompt(autojump_clock, side, session):
    first = await session.ask("one", SHORT)
    assert (first.finish_reason, len(session.history)) == (FinishReason.LENGTH, 2)
    second = await session.ask("two", GREEDY)
    assert session.history == [user("one"), assistant(first.text), user("two"), assistant(second.text)]


@pytest.mark.parametrize("content", ["", " \n"])
async def test_a_message_may_be_empty(autojump_clock, side, content):
    assert (await side.api.generate([user(content)], GREEDY)).text == side.answer([user(content)])
