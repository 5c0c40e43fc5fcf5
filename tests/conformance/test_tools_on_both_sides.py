"""Tools: forced calls, in chunks and whole; their outputs, the history, and requests that end within a call."""

import json

import pytest
import trio
from helpers.realtime_tools import CLOCK, NAMED, ROOM, WEATHER, function
from helpers.sides import GREEDY, assistant, user

from trioengine import FinishReason, Grammar, RequestRejected, SamplingParams, TimedOut, ToolCall

CALLING = SamplingParams(temperature=0, max_tokens=200)
TOOLS = [function(WEATHER), function(CLOCK)]
FORCED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}


@pytest.fixture
def simulation_options():
    return {"limits": ROOM}


def check_weather(call):
    assert isinstance(call, ToolCall) and call.id.startswith("call_") and call.name == "weather"
    arguments = json.loads(call.arguments)
    assert arguments.keys() == {"city", "days"} and arguments["days"] in (1, 2)


def output_of(call, text):
    return {"role": "tool", "tool_call_id": call.id, "content": text}


@pytest.mark.parametrize("shape", ["chat", "flat"])
async def test_a_forced_call_and_its_output(autojump_clock, side, session, shape):
    tools = TOOLS if shape == "chat" else [WEATHER, CLOCK]
    forced = {"tools": tools, "tool_choice": FORCED["tool_choice"] if shape == "chat" else NAMED}
    completion = await session.ask("hello", CALLING, **forced)
    assert (completion.text, completion.finish_reason) == ("", FinishReason.TOOL_CALLS)
    (call,) = completion.tool_calls
    check_weather(call)
    called = {"role": "assistant", "content": "", "tool_calls": [call.to_json()]}
    assert session.history == [user("hello"), called]
    output = output_of(call, "sunny")
    following = await session.ask([output, user("and now?")], CALLING, tools=tools)
    assert following.tool_calls == () and following.text
    assert session.history == [user("hello"), called, output, user("and now?"), assistant(following.text)]
    async with side.api.open_session(history=[user("hello"), called, output]) as another:
        assert (await another.ask("and now?", CALLING, tools=tools)).text == following.text


async def test_a_call_in_chunks(autojump_clock, side, session):
    async with session.generate("hello", CALLING, **FORCED) as generation:
        chunks = [chunk async for chunk in generation]
        assert generation.outcome.finish_reason is FinishReason.TOOL_CALLS
        (call,) = generation.completion.tool_calls
    check_weather(call)
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert len(deltas) > 5
    assert {(delta.index, delta.id, delta.name) for delta in deltas} == {(0, call.id, "weather")}
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    assert not any(chunk.text for chunk in chunks)


async def test_a_slow_reader_gets_whole_calls(autojump_clock, side, session):
    async with session.generate("hello", CALLING, min_tokens=70, tools=[CLOCK], tool_choice="required") as generation:
        await side.until_finished(1)
        completion = await generation.result()
    assert len(completion.tool_calls) > 1 and {call.name for call in completion.tool_calls} == {"clock"}
    assert len({call.id for call in completion.tool_calls}) == len(completion.tool_calls)
    single = await session.ask(
        [output_of(call, "noon") for call in completion.tool_calls],
        CALLING,
        tools=[CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert len(single.tool_calls) == 1


async def test_a_whole_answer_of_its_own(autojump_clock, side):
    for ask in (side.api.ask, side.api.generate):
        (call,) = (await ask("hello", CALLING, **FORCED)).tool_calls
        check_weather(call)


async def test_an_answer_without_calls(autojump_clock, side, session):
    hidden = await session.ask("hello", GREEDY, tools=TOOLS, tool_choice="none")
    assert hidden.text == side.answer([user("hello")])
    session.replace_history([])
    answer = await session.ask("hello", GREEDY, tools=TOOLS)
    assert (answer.tool_calls, answer.finish_reason) == ((), FinishReason.STOP)
    assert answer.text not in ("", hidden.text)
    assert session.history == [user("hello"), assistant(answer.text)]


async def test_a_call_cut_by_the_number_of_tokens(autojump_clock, side, session):
    completion = await session.ask("hello", CALLING, max_tokens=60, **FORCED)
    assert (completion.text, completion.tool_calls) == ("", ())
    assert completion.finish_reason is FinishReason.LENGTH
    assert session.history == [user("hello"), assistant("")]


@pytest.mark.parametrize("keeps", [False, True])
async def test_leaving_within_a_call(autojump_clock, side, session, keeps):
    """The turn is taken back: half a call is no answer to keep."""
    async with session.generate("hello", CALLING, keep_partial=keeps, **FORCED) as generation:
        async for chunk in generation:
            if chunk.tool_calls and chunk.tool_calls[0].arguments:
                break
    completion = generation.completion
    assert (completion.text, completion.tool_calls, completion.finish_reason) == ("", (), FinishReason.ABORT)
    assert session.history == []
    assert (await session.ask("hello", GREEDY)).text == side.answer([user("hello")])


async def test_a_scope_cancelled_within_a_call(autojump_clock, side, session):
    with trio.CancelScope() as scope:
        async with session.generate("hello", CALLING, **FORCED) as generation:
            async for chunk in generation:
                if chunk.tool_calls and chunk.tool_calls[0].arguments:
                    scope.cancel()
    assert scope.cancelled_caught and generation.completion.tool_calls == ()
    assert session.history == []
    following = await session.ask("hello", CALLING, **FORCED, wait=True)
    check_weather(following.tool_calls[0])


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_timeout_among_calls(autojump_clock, side, session, keeps):
    options = {"tools": [CLOCK], "tool_choice": "required", "min_tokens": 190, "keep_partial": keeps}
    with pytest.raises(TimedOut) as timed_out:
        await session.ask("hello", CALLING, timeout=0.15, **options)
    calls = timed_out.value.completion.tool_calls
    called = {"role": "assistant", "content": "", "tool_calls": [call.to_json() for call in calls]}
    assert calls and session.history == ([user("hello"), called] if keeps else [])


async def test_leaving_after_a_call_keeps_it(autojump_clock, side, session):
    options = {"tools": [CLOCK], "tool_choice": "required", "min_tokens": 150}
    async with session.generate("hello", CALLING, keep_partial=True, **options) as generation:
        async for chunk in generation:
            if any(delta.index == 1 for delta in chunk.tool_calls):
                break
    calls = generation.completion.tool_calls
    assert calls and calls[0].arguments == "{}"
    called = {"role": "assistant", "content": "", "tool_calls": [call.to_json() for call in calls]}
    assert session.history == [user("hello"), called]
    following = await session.ask("hello", GREEDY)
    async with side.api.open_session(history=[user("hello"), called]) as another:
        assert (await another.ask("hello", GREEDY)).text == following.text


async def test_an_answer_of_text_and_calls_in_a_history(autojump_clock, side):
    calls = [ToolCall(f"c{index}", "clock", "{}") for index in range(2)]
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call.to_json() for call in calls]}
    history = [user("hello"), called, *(output_of(call, "noon") for call in calls)]
    text = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    plain = [user("hello"), assistant(f"I look.\n{text}\n{text}")]
    async with side.api.open_session(history=history) as session:
        assert session.history == history
        answer = await session.ask("so?", GREEDY)
        prompt = [*plain, *({"role": "tool", "content": "noon"} for _ in calls), user("so?")]
        assert answer.text == side.answer(prompt)
        session.replace_history(history[:2])
        assert (await session.ask("so?", GREEDY)).text == side.answer([*plain, user("so?")])


REFUSED = [
    ({"tools": 3}, "tools must be a list of at most 128 functions, got 3", "tools"),
    ({"tools": TOOLS * 65}, "tools must be a list of at most 128 functions", "tools"),
    ({"tools": [3]}, "tools[0] must be a function, as in", "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] must be a function", "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name must be a string", "tools[0].name"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name must be", "tools[0].function.name"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice must be one of auto, none, required", "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {**NAMED, "name": "x"}}, "tool_choice.name must name", "tool_choice.name"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls must be True or False", "parallel_tool_calls"),
    (
        {"tools": TOOLS, "tool_choice": "required", "grammar": Grammar.json_object()},
        "tool_choice that forces a call does not go with a grammar",
        "tool_choice",
    ),
]


@pytest.mark.parametrize(("options", "message", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_tools_that_are_refused(autojump_clock, side, session, options, message, param):
    for call in (session.generate, session.ask, side.api.ask):
        with pytest.raises(RequestRejected) as refused:
            given = call("x", CALLING, **options)
            await given
        assert refused.value.message.startswith(message) and refused.value.param == param


async def test_parameters_of_which_no_grammar_can_be_made(autojump_clock, side, session):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}]
    with pytest.raises(RequestRejected, match="tools") as refused:
        await session.ask("x", CALLING, tools=tools, tool_choice="required")
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "tools")
    assert session.history == []
