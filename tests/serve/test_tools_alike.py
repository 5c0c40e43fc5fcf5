"""An embedding's requests with tools show the model the same as a chat completion with them."""

import pytest
from helpers.clients import open_clients
from helpers.realtime_tools import CLOCK, ROOM, WEATHER, clients_of_a_template, function

from trioengine import Grammar, SamplingParams

TOOLS = [function(WEATHER), function(CLOCK)]
PARAMS = SamplingParams(temperature=0, max_tokens=200)
FIELDS = {"max_tokens": 200, "ignore_eos": False}
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"at": [1]}'}}
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
]
CALLING = 'start: "I look.\\n<tool_call>\\n{\\"name\\": \\"clock\\", \\"arguments\\": {}}\\n</tool_call>"'


@pytest.fixture(params=["texts", "template"])
async def clients(request, autojump_clock):
    """Of a model whose template prints no tools, and of one whose template prints them."""
    opening = open_clients(limits=ROOM) if request.param == "texts" else clients_of_a_template()
    async with opening as clients:
        yield clients


@pytest.mark.parametrize(
    "options", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}]
)
async def test_the_same_prompt_and_answer(autojump_clock, clients, options):
    completion = await clients.engine.generate(MESSAGES, PARAMS, **options)
    answer = (await clients.chat(messages=MESSAGES, **FIELDS, **options)).json
    (choice,) = answer["choices"]
    text = choice["message"]["content"]
    assert completion.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert (completion.text or None, completion.finish_reason) == (text, choice["finish_reason"])
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    assert [call.to_json()["function"] for call in completion.tool_calls] == calls


async def test_text_and_a_call(autojump_clock, clients):
    """By a grammar in place of a model that wants it; the next prompt is that of the history."""
    params = SamplingParams(temperature=0, max_tokens=200, grammar=Grammar.lark(CALLING))
    async with clients.engine.open_session() as session:
        completion = await session.ask("hello", params, tools=TOOLS)
        (call,) = completion.tool_calls
        assert (completion.text, completion.finish_reason, call.arguments) == ("I look.", "tool_calls", "{}")
        history = session.history
        assert history[1] == {"role": "assistant", "content": "I look.", "tool_calls": [call.to_json()]}
        output = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        following = await session.ask([output], PARAMS, tools=TOOLS)
    answer = (await clients.chat(messages=[*history, output], tools=TOOLS, **FIELDS)).json
    assert following.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert following.text == answer["choices"][0]["message"]["content"]
    assert following.usage.cached_tokens > 0


async def test_a_stop_string_within_a_call_cuts_it(autojump_clock, clients):
    options = {"tools": TOOLS[:1], "tool_choice": "required"}
    completion = await clients.engine.generate("hello", PARAMS, stop='"days', **options)
    assert (completion.tool_calls, completion.finish_reason) == ((), "stop")


async def test_a_call_that_goes_on_after_a_loss(autojump_clock, clients):
    """The parts that the reader has are not repeated."""
    options = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    whole = await clients.engine.generate("hello", PARAMS, **options)
    async with clients.engine.open_session() as session, session.generate("hello", PARAMS, **options) as generation:
        deltas = []
        async for chunk in generation:
            deltas += chunk.tool_calls
            if len(deltas) == 3:
                clients.simulation.worker.kill()
        completion = generation.completion
    assert completion.resumed == 1
    assert "".join(delta.arguments for delta in deltas) == completion.tool_calls[0].arguments
    assert completion.tool_calls[0].arguments == whole.tool_calls[0].arguments
