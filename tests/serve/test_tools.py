"""Tools of chat completions: calls that are forced or come by themselves, in histories, streamed, and refusals."""

import json
from dataclasses import replace

import pytest
from helpers.clients import CHAT, chat, open_clients

from trioengine.testing.simulation import DEFAULT_LIMITS

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ROOM = replace(DEFAULT_LIMITS, max_model_len=2048, kv_blocks_total=512)
LONG = {"max_tokens": 200, "ignore_eos": False}


@pytest.fixture
async def clients(autojump_clock):
    async with open_clients(limits=ROOM) as clients:
        yield clients


def check_weather(call):
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"city", "days"} and arguments["days"] in (1, 2)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_forced_calls(autojump_clock, clients, choice):
    tools = [WEATHER] if choice == "required" else [CLOCK, WEATHER]
    answer = await clients.chat(tools=tools, tool_choice=choice, parallel_tool_calls=False, **LONG)
    (whole,) = answer.json["choices"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    (call,) = whole["message"]["tool_calls"]
    check_weather(call)
    answer = await clients.chat(tools=tools, tool_choice=choice, parallel_tool_calls=False, stream=True, **LONG)
    deltas = [event["choices"][0]["delta"] for event in answer.events[:-1]]
    assert answer.events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)
    first, *more = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert (first["index"], first["function"]) == (0, {"name": "weather", "arguments": ""})
    assert len(more) > 5 and all(each.keys() == {"index", "function"} for each in more)
    assert "".join(each["function"]["arguments"] for each in more) == call["function"]["arguments"]


async def test_several_calls(autojump_clock, clients):
    """By a grammar in place of a model that wants them."""
    line = '"<tool_call>\\n{\\"name\\": \\"clock\\", \\"arguments\\": {}}\\n</tool_call>\\n"'
    form = {"structured_outputs": {"grammar": f'start: "I look.\\n" {line} {line}'}}
    (whole,) = (await clients.chat(tools=[CLOCK], **LONG, **form)).json["choices"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", "I look.")
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [{"name": "clock", "arguments": "{}"}] * 2
    answer = await clients.chat(tools=[CLOCK], stream=True, **LONG, **form)
    deltas = [event["choices"][0]["delta"] for event in answer.events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    assert {call["index"] for delta in deltas for call in delta.get("tool_calls", ())} == {0, 1}


async def test_a_text_stays_a_text(autojump_clock, clients):
    plain = (await clients.chat(tools=[WEATHER])).json["choices"][0]
    assert plain["finish_reason"] == "length" and "tool_calls" not in plain["message"]
    answer = await clients.chat(tools=[WEATHER], stream=True)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    assert text == plain["message"]["content"]


async def test_the_model_sees_the_tools_and_the_calls(autojump_clock, clients):
    """Its template prints neither: they are texts."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = await clients.chat(messages=messages, tools=[CLOCK])
    instructions = (
        "be kind\n\nYou may call functions. These are their JSON schemas, one in a line:\n"
        f"{json.dumps(CLOCK)}\n"
        "To call one, answer with its name and arguments as JSON, in this form:\n"
        '<tool_call>\n{"name": "function", "arguments": {"argument": "value"}}\n</tool_call>'
    )
    plain = [
        {"role": "system", "content": instructions},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'},
        {"role": "tool", "content": "noon"},
    ]
    same = await clients.chat(messages=plain)
    assert answer.json["usage"]["prompt_tokens"] == same.json["usage"]["prompt_tokens"]
    assert answer.json["choices"][0]["message"]["content"] == same.json["choices"][0]["message"]["content"]


async def test_other_tools_are_passed_over_and_named(autojump_clock, clients):
    answer = await clients.chat(tools=[{"type": "web_search"}, WEATHER])
    assert (answer.status, answer.headers["x-unknown-fields"]) == (200, "tools.web_search")


async def test_no_choice_of_tools_is_a_plain_answer(autojump_clock, clients):
    plain, answer = await clients.chat(), await clients.chat(tools=[WEATHER], tool_choice="none")
    assert answer.json["choices"] == plain.json["choices"]


async def test_another_form(autojump_clock):
    async with open_clients(limits=ROOM, tool_call_parser="json") as clients:
        answer = await clients.chat(tools=[WEATHER], tool_choice="required", **LONG)
        check_weather(answer.json["choices"][0]["message"]["tool_calls"][0])


async def test_parameters_with_references(autojump_clock, clients):
    """As pydantic makes them of nested models."""
    kind = {"$defs": {"Kind": {"enum": ["cat", "dog"]}}, "properties": {"kind": {"$ref": "#/$defs/Kind"}}}
    parameters = {"type": "object", "required": ["kind"], "additionalProperties": False, **kind}
    tools = [CLOCK, {"type": "function", "function": {"name": "pet", "parameters": parameters}}]
    choice = {"type": "function", "function": {"name": "pet"}}
    answer = await clients.chat(tools=tools, tool_choice=choice, **LONG)
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["kind"] in ("cat", "dog")


async def test_arguments_of_a_history_that_are_no_json(autojump_clock, clients):
    for arguments in ("[" * 60_000 + "]" * 60_000, "{", "[]", "\n"):
        call = {"type": "function", "function": {"name": "clock", "arguments": arguments[:500]}}
        deep = {"type": "function", "function": {"name": "clock", "arguments": arguments}}
        for each in (call, deep):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [each]}]
            answer = await clients.request("POST", CHAT, chat(messages=messages))
            assert answer.status == 200 or answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "text", ["ab   <tool_cal", "ab \n\n ", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>']
)
async def test_streamed_logprobs_are_all_there(autojump_clock, clients, text):
    fields = {"tools": [CLOCK], "structured_outputs": {"choice": [text]}, "logprobs": True, **LONG}
    whole = (await clients.chat(**fields)).json["choices"][0]["logprobs"]["content"]
    events = (await clients.chat(stream=True, **fields)).events[:-1]
    found = [event["choices"][0]["logprobs"] for event in events]
    assert [each for logprobs in found if logprobs for each in logprobs["content"]] == whole


async def test_a_stop_string_in_a_forced_call(autojump_clock, clients):
    """The call is cut, and the finish reason does not promise one."""
    fields = {"tools": [WEATHER], "tool_choice": "required", "stop": ['"days'], **LONG}
    assert (await clients.chat(**fields)).json["choices"][0]["finish_reason"] == "stop"
    assert (await clients.chat(stream=True, **fields)).events[-2]["choices"][0]["finish_reason"] == "stop"


REFUSED = [
    (
        {"tools": [{"type": "function", "function": {"name": "f\n"}}]},
        "invalid_value",
        "tools[0].function.name",
    ),
    ({"tools": [{"type": "function"}]}, "missing_parameter", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [TIME] * 129}, "invalid_value", "tools"),
    ({"tools": [], "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tool_choice": NAMED}, "invalid_value", "tool_choice"),
    ({"tools": [TIME], "tool_choice": NAMED}, "invalid_value", "tool_choice.function.name"),
    ({"tools": [TIME], "tool_choice": "some"}, "invalid_value", "tool_choice"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
        "invalid_grammar",
        "tools",
    ),
    (
        {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "invalid_value",
        "tool_choice",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
    ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort"),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_tools_that_are_refused(autojump_clock, clients, fields, code, param):
    answer = await clients.request("POST", CHAT, chat(**fields))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)
    assert answer.error["message"].startswith(param)
