"""Requests that are refused alone: bad prompts, second users, objects that were not entered. The session goes on."""

import re

import pytest
import trio
from helpers.sides import GREEDY, LONG, assistant, user

from trioengine import RequestRejected, SamplingParams, SessionBusy
from trioengine.core.types import Cause

IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
BAD_PROMPTS = [
    ("", "empty_prompt", "prompt"),
    ([], "empty_prompt", "prompt"),
    (b"x", "invalid_value", "prompt"),
    (5, "invalid_value", "prompt"),
    (None, "invalid_value", "prompt"),
    ({}, "invalid_value", "prompt"),
    (user("hello"), "invalid_value", "prompt"),
    ([user("x"), 3], "invalid_value", "prompt[1]"),
    ([{"role": "king", "content": "x"}], "invalid_value", "prompt[0].role"),
    ([{"role": "user", "content": 5}], "invalid_value", "prompt[0].content"),
    ([{"role": "user"}], "invalid_value", "prompt[0].content"),
    ([IMAGE], "invalid_value", "prompt[0].content[0].image_url"),
    ("x" * 600, "context_length_exceeded", "prompt"),
    ("x" * 100_000, "context_length_exceeded", "prompt"),
    ([user("x" * 100_000)], "context_length_exceeded", "prompt"),
    ("half \ud800", "invalid_value", "prompt"),
]


@pytest.mark.parametrize(("prompt", "code", "param"), BAD_PROMPTS, ids=[f"{str(bad[0])[:40]!r}" for bad in BAD_PROMPTS])
async def test_a_bad_prompt_is_refused_alone(autojump_clock, side, session, prompt, code, param):
    generation = session.generate(prompt, GREEDY)
    with pytest.raises(RequestRejected) as refused:
        await generation.__aenter__()
    assert (refused.value.code, refused.value.param) == (code, param)
    assert session.history == []
    with pytest.raises(RequestRejected):
        await side.api.generate(prompt, GREEDY)
    assert (await session.ask("hello", GREEDY)).text == side.answer([user("hello")])


HALF = {"role": "user", "content": [{"type": "text", "text": "half "}, {"type": "text", "text": "\ud800"}]}
PLACES = [
    ("half \ud800", "prompt"),
    ([user("hello"), user("half \ud800")], "prompt[1].content"),
    ([HALF], "prompt[0].content"),
]


@pytest.mark.parametrize(("prompt", "place"), PLACES, ids=["text", "message", "parts"])
async def test_the_place_of_a_fault_is_named_by_the_arguments_of_the_call(autojump_clock, side, prompt, place):
    with pytest.raises(RequestRejected) as refused:
        await side.api.generate(prompt, GREEDY)
    assert refused.value.param.startswith(place)
    assert re.match(rf"{re.escape(refused.value.param)} .* surrogate", refused.value.message)


async def test_a_bad_history_is_refused_with_its_place(autojump_clock, side):
    history = [user("hello"), assistant("half \ud800"), user("more")]
    with pytest.raises(RequestRejected) as refused:
        async with side.api.open_session(history=history):
            pass
    assert re.match(r"history\[1\]\.content .* surrogate", refused.value.message)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "history[1].content")


@pytest.mark.parametrize("place", ["description", "parameters.title"])
async def test_half_of_a_pair_in_tools_is_refused_with_its_place(autojump_clock, side, place):
    function = {"name": "f", "description": "", "parameters": {"title": ""}}
    (function["parameters"] if "." in place else function)[place.rpartition(".")[2]] = "half \ud800"
    with pytest.raises(RequestRejected, match=rf"^tools\[0\]\.{place} is not valid Unicode") as refused:
        await side.api.generate("hello", GREEDY, tools=[function])
    assert (refused.value.code, refused.value.param) == ("invalid_value", f"tools[0].{place}")


async def test_parameters_beyond_the_vocabulary_are_refused(autojump_clock, side):
    for params, name in (
        (SamplingParams(stop_token_ids=(259,)), "stop_token_ids"),
        (SamplingParams(logit_bias={999_999: 1}), "logit_bias"),
    ):
        with pytest.raises(RequestRejected, match="vocabulary of 259") as refused:
            await side.api.generate("hello", params)
        assert refused.value.param == name


async def test_a_second_request_is_refused_and_disturbs_nothing(autojump_clock, side, session):
    async with session.generate("hello", GREEDY) as generation:
        for prompt in ("two", "three"):
            with pytest.raises(SessionBusy, match="the session is busy"):
                await session.generate(prompt).__aenter__()
        with pytest.raises(SessionBusy):
            session.replace_history([])
        assert (await generation.result()).text == side.answer([user("hello")])
    if side.name == "engine":  # a client does not send them
        assert (side.engine.statistics().received, side.engine.statistics().rejected) == (1, 2)


async def test_sessions_and_generations_are_entered_once(autojump_clock, side):
    session = side.api.open_session()
    with pytest.raises(RuntimeError, match="not entered"):
        await session.generate("hello").__aenter__()
    async with session:
        with pytest.raises(RuntimeError, match="a session is entered once"):
            await session.__aenter__()
        generation = session.generate("x", GREEDY)
        with pytest.raises(RuntimeError, match="not entered"):
            _ = generation.request_id
        async with generation:
            with pytest.raises(RuntimeError, match="a generation is entered once"):
                await generation.__aenter__()
            with pytest.raises(RuntimeError, match="no outcome"):
                _ = generation.completion


async def test_a_generation_is_read_by_one_task(autojump_clock, session):
    async with session.generate("one", LONG) as generation:
        busy = []

        async def read():
            try:
                await generation.result()
            except trio.BusyResourceError as exc:
                busy.append(exc)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
        assert len(busy) == 1


async def test_a_generation_that_was_not_entered_is_not_read(autojump_clock, session):
    with pytest.raises(RuntimeError, match="was not entered: use `async with session"):
        await session.generate("hi").result()
    with pytest.raises(RuntimeError, match="was not entered"):
        async for _ in session.generate("hi"):
            pass
    async with session.generate("hi", LONG):
        refused = session.generate("too many")
        with pytest.raises(SessionBusy):
            await refused.__aenter__()
        with pytest.raises(RuntimeError, match="was not entered"):
            await anext(refused)
    aborted = session.generate("hi")
    aborted.abort()
    assert (await aborted.result()).cause is Cause.CLIENT


async def test_a_reader_waits_while_another_task_enters(autojump_clock, side, session):
    generation = session.generate("hi", GREEDY)

    async def enter(task_status):
        task_status.started()
        await generation.__aenter__()

    async with trio.open_nursery() as nursery:
        await nursery.start(enter)
        await generation.result()
    assert generation.completion.text == side.answer([user("hi")])
