"""The tools of a request: two shapes, the choice, refusals; and calls that grow."""

import json

import pytest

from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.tools import (
    CHAT_PATHS,
    AskedTools,
    GrowingCalls,
    JsonObject,
    ToolFunction,
    answer_fields,
    asked_tools,
    check_choice,
    checked_calls,
)
from trioengine.core.types import ToolCall, ToolCallDelta

PLAIN = SamplingParams()
SCHEMA = {"type": "object"}
DEEP = {"type": "object", "default": json.loads("[" * 60 + "]" * 60)}
HALF, HALVES = "half \ud800", "is not valid Unicode: it has a lone surrogate"
WEATHER = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
CLOCK = {"name": "clock"}
CHAT = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
FLAT = [{"type": "function", **WEATHER}, CLOCK]
FUNCTIONS = (ToolFunction("weather", "The weather.", SCHEMA), ToolFunction("clock"))


@pytest.mark.parametrize("tools", [CHAT, FLAT, tuple(CHAT)])
def test_both_shapes(tools):
    assert asked_tools(tools, "auto", True, PLAIN) == AskedTools(FUNCTIONS)
    assert asked_tools(tools, "required", False, PLAIN) == AskedTools(FUNCTIONS, is_forced=True, is_single=True)
    for choice in ({"type": "function", "function": {"name": "clock"}}, {"type": "function", "name": "clock"}):
        asked = asked_tools(tools, choice, True, PLAIN)
        assert asked == AskedTools(FUNCTIONS, is_forced=True, chosen="clock", is_single=True)
        assert asked.allowed == FUNCTIONS[1:]
    assert [function.to_json() for function in FUNCTIONS] == [WEATHER, CLOCK]


@pytest.mark.parametrize(("tools", "choice"), [(None, "auto"), ([], "auto"), (None, "none"), (CHAT, "none")])
def test_no_tools(tools, choice):
    assert asked_tools(tools, choice, True, PLAIN) is None


REFUSED = [
    ({"tools": "weather"}, "tools", "must be a list of at most 128 functions, got 'weather'"),
    ({"tools": CHAT * 65}, "tools", "must be a list"),
    ({"tools": [3]}, "tools[0]", "must be a function"),
    ({"tools": [*CHAT, {"type": "web_search"}]}, "tools[2]", "must be a function"),
    ({"tools": [{"function": 3}]}, "tools[0].function", "must be an object, got 3"),
    ({"tools": [{"name": "a b"}]}, "tools[0].name", "must be a string of 1 to 64 letters, digits"),
    ({"tools": [{"name": "a\n"}]}, "tools[0].name", "must be a string"),
    ({"tools": [{"function": {}}]}, "tools[0].function.name", "must be a string"),
    ({"tools": [{"name": "a", "description": 3}]}, "tools[0].description", "must be a string, got 3"),
    ({"tools": [{"name": "a", "parameters": 3}]}, "tools[0].parameters", "must be a JSON schema"),
    ({"tools": [{"name": "a", "parameters": {"a": {1}}}]}, "tools[0].parameters", "must be a JSON schema"),
    ({"tools": [{"name": "a", "parameters": DEEP}]}, "tools[0].parameters", "must be a JSON schema"),
    ({"tools": [{"name": "a", "parameters": {"a": float("nan")}}]}, "tools[0].parameters", "must be a JSON schema"),
    ({"tools": [{"name": "a", "description": HALF}]}, "tools[0].description", HALVES),
    (
        {"tools": [{"function": {"name": "a", "parameters": {"a": [HALF]}}}]},
        "tools[0].function.parameters.a[0]",
        HALVES,
    ),
    ({"tools": [{"name": "a", "parameters": {"a": {HALF: 1}}}]}, "tools[0].parameters.a", HALVES),
    ({"tools": [{"name": "a", "parameters": {1: 1}}]}, "tools[0].parameters", "has a key that is not a string: 1"),
    ({"choice": "some"}, "tool_choice", "must be one of auto, none, required, or a function"),
    ({"choice": {"type": "tool"}}, "tool_choice", "must be one of"),
    ({"choice": {"name": 3}}, "tool_choice.name", "must name one of the tools, got 3"),
    ({"choice": {"function": {"name": "x"}}}, "tool_choice.function.name", "must name one of the tools, got 'x'"),
    ({"choice": {"name": "x"}}, "tool_choice.name", "must name one of the tools, got 'x'"),
    ({"tools": [], "choice": "required"}, "tool_choice", "needs tools that are functions"),
    ({"tools": None, "choice": {"name": "x"}}, "tool_choice", "needs tools that are functions"),
    ({"parallel": "yes"}, "parallel_tool_calls", "must be True or False, got 'yes'"),
]


@pytest.mark.parametrize(("changes", "param", "problem"), REFUSED, ids=range(len(REFUSED)))
def test_a_refusal_names_the_path(changes, param, problem):
    given = {"tools": CHAT, "choice": "auto", "parallel": True, **changes}
    with pytest.raises(RequestRejected) as refused:
        asked_tools(**given, params=PLAIN)
    assert (refused.value.code, refused.value.param) == ("invalid_value", param)
    assert refused.value.message.startswith(f"{param} {problem}")


def test_a_forced_call_beside_a_grammar():
    params = SamplingParams(grammar=Grammar.json_object())
    assert asked_tools(CHAT, "auto", True, params) == AskedTools(FUNCTIONS)
    with pytest.raises(RequestRejected, match=r"^tool_choice that forces a call does not go with a grammar"):
        asked_tools(CHAT, "required", True, params)


def test_a_choice_without_a_name_is_good():
    check_choice(AskedTools(FUNCTIONS, is_forced=True), CHAT_PATHS)


def test_calls_grow_and_are_read_once():
    calls = GrowingCalls()
    assert not calls.has_unread and calls.read() == calls.whole == () and len(calls) == 0
    calls.begin("c0", "clock")
    assert calls.has_unread
    assert calls.read() == (ToolCallDelta(0, "c0", "clock", ""),)
    assert not calls.has_unread
    calls.grow("{")
    calls.grow("}")
    calls.begin("c1", "weather")
    calls.grow('{"a"')
    assert calls.read() == (ToolCallDelta(0, "c0", "clock", "{}"), ToolCallDelta(1, "c1", "weather", '{"a"'))
    assert calls.read() == ()
    assert calls.whole == (ToolCall("c0", "clock", "{}"),)
    calls.grow(": 1}")
    assert calls.read() == (ToolCallDelta(1, "c1", "weather", ": 1}"),)
    assert calls.whole[1] == ToolCall("c1", "weather", '{"a": 1}')
    assert len(calls) == 2


@pytest.mark.parametrize("text", ["{}", '{"a": {"b": ["}"]}}', r'{"a": "\"}\\"}', '{"a": [{}, {"}{": "["}]}'])
def test_the_end_of_an_object(text):
    """It is found in a text that goes on behind it, and not before all pieces of the object are there."""
    assert JsonObject().take(text + "}, ") == len(text)
    value = JsonObject()
    for character in text:
        assert not value.is_complete and value.take(character) == 1
    assert value.is_complete and value.take("}") == 0


def test_the_fields_of_an_answer():
    call = ToolCall("c0", "clock", "{}")
    entry = {"id": "c0", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    assert answer_fields("hi", ()) == {"content": "hi"}
    assert answer_fields("", [call]) == {"content": "", "tool_calls": [entry]}


def test_calls_of_a_history():
    call = ToolCall("c0", "clock", '{"at": 1}')
    parsed = {"id": "c0", "function": {"name": "clock", "arguments": {"at": 1}}}
    assert checked_calls([call.to_json(), parsed], "tool_calls") == (call, call)


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "tool_calls"),
        (3, "tool_calls"),
        ([3], "tool_calls[0].id"),
        ([{"id": "c0"}], "tool_calls[0].function.name"),
        ([{"id": "c0", "function": {"name": "f"}}], "tool_calls[0].function.arguments"),
        ([{"id": "c0", "function": {"name": "f", "arguments": {"a": {1}}}}], "tool_calls[0].function.arguments"),
    ],
)
def test_calls_of_a_history_that_are_refused(calls, param):
    with pytest.raises(RequestRejected) as refused:
        checked_calls(calls, "tool_calls")
    assert refused.value.param == param and refused.value.message.startswith(f"{param} must be")


@pytest.mark.parametrize("path", ["id", "function.name", "function.arguments"])
def test_a_call_of_a_history_with_half_of_a_pair(path):
    call = {"id": "c0", "function": {"name": "f", "arguments": "{}"}}
    (call["function"] if "." in path else call)[path.rpartition(".")[2]] = HALF
    with pytest.raises(RequestRejected) as refused:
        checked_calls([call], "tool_calls")
    assert refused.value.param == f"tool_calls[0].{path}"
    assert refused.value.message == f"tool_calls[0].{path} {HALVES}"
