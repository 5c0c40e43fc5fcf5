"""Tools and calls in prompts: for a template that prints them, and as texts."""

import json

import pytest

from trioengine.core.errors import RequestRejected
from trioengine.core.tools import AskedTools, ToolFunction
from trioengine.text.tool_answer import ToolAnswer
from trioengine.text.tool_calls import HERMES
from trioengine.text.tools import tools_of, with_instructions, with_shown_calls

CLOCK = ToolFunction("clock", None, {"type": "object"})
SYSTEM = {"role": "system", "content": "be kind"}
USER = {"role": "user", "content": "a"}


def called(*calls, content="I look."):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def call(arguments, name="clock"):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_forms_of_tools():
    tools = tools_of(AskedTools((CLOCK,)), HERMES)
    assert tools.grammar is None
    assert tools.variable == [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    assert json.dumps(tools.variable[0]) in tools.instructions and "<tool_call>" in tools.instructions
    assert tools_of(AskedTools((CLOCK,), is_forced=True), HERMES).grammar is not None
    with pytest.raises(RequestRejected, match=r"^tools: ") as refused:
        tools_of(AskedTools((ToolFunction("f", None, {"description": "x" * 70_000}),), is_forced=True), HERMES)
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "tools")


def test_instructions_join_the_system_message():
    assert with_instructions([USER], "Do.") == ({"role": "system", "content": "Do."}, USER)
    assert with_instructions([SYSTEM, USER], "Do.") == ({"role": "system", "content": "be kind\n\nDo."}, USER)
    parts = [{"type": "text", "text": "be kind"}]
    (first,) = with_instructions([{"role": "system", "content": parts}], "Do.")
    assert first["content"] == [*parts, {"type": "text", "text": "Do."}]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"at": [1]}', {"at": [1]}),
        ({"at": 1}, {"at": 1}),
        *(
            (text, text)
            for text in ("", "[]", "{", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": ' + "[" * 70 + "]" * 70 + "}")
        ),
    ],
)
def test_a_template_gets_arguments_as_an_object(arguments, shown):
    message = with_shown_calls(called(call(arguments)), HERMES, takes_tools=True)
    assert message == called(call(shown))
    assert [*message["tool_calls"][0]] == ["type", "id", "function"]


def test_calls_as_a_text():
    text = '<tool_call>\n{"name": "clock", "arguments": {"at": 1}}\n</tool_call>'
    message = with_shown_calls(called(call('{"at": 1}'), call({"at": 1})), HERMES, takes_tools=False)
    assert message == {"role": "assistant", "content": f"I look.\n{text}\n{text}"}
    for content in ("", None):
        assert with_shown_calls(called(call({"at": 1}), content=content), HERMES, takes_tools=False)["content"] == text


def test_calls_as_a_text_behind_an_image():
    text = '<tool_call>\n{"name": "clock", "arguments": {"at": 1}}\n</tool_call>'
    parts = [{"type": "image"}, {"type": "text", "text": "I look."}]
    message = with_shown_calls(called(call({"at": 1}), call({"at": 1}), content=parts), HERMES, takes_tools=False)
    shown = {"type": "text", "text": f"{text}\n{text}"}
    assert message == {"role": "assistant", "content": [*parts, shown]}
    assert with_shown_calls(called(content=parts), HERMES, takes_tools=False)["content"] == parts


@pytest.mark.parametrize("strange", [3, {"function": 3}, {"function": {"name": 3, "arguments": "{}"}}, {"name": "f"}])
def test_a_call_in_another_shape_is_shown_as_it_is(strange):
    assert with_shown_calls(called(strange), HERMES, takes_tools=True)["tool_calls"][0] is not None
    shown = with_shown_calls(called(strange), HERMES, takes_tools=False)["content"]
    assert shown.startswith("I look.\n<tool_call>\n") and shown.endswith("\n</tool_call>")


@pytest.mark.parametrize("calls", ["x", 3, None])
def test_calls_that_are_no_list_are_left(calls):
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert with_shown_calls(message, HERMES, takes_tools=False) == message


def test_an_answer_is_divided_while_it_arrives():
    answer, pieces = ToolAnswer(HERMES, "call_"), []
    for piece in ("I lo", "ok.\n<tool", '_call>{"name": "clock", "arguments": {"a": ', "1}}"):
        pieces.append(piece)
        answer.take(pieces)
        answer.take(pieces)  # nothing new
    assert answer.text == "I look."
    assert answer.calls.read()[0].arguments == '{"a": 1}'
    answer.finish()
    (whole,) = answer.calls.whole
    assert (whole.id, whole.name, whole.arguments) == ("call_0", "clock", '{"a": 1}')
    assert answer.text == "I look."


@pytest.mark.parametrize(("is_aborted", "text"), [(True, "I look."), (False, 'I look.\n<tool_call>{"na')])
def test_the_beginning_of_a_call(is_aborted, text):
    """It is text, unless the answer was aborted."""
    answer = ToolAnswer(HERMES, "call_")
    answer.take(['I look.\n<tool_call>{"na'])
    answer.finish(is_aborted=is_aborted)
    assert (answer.text, answer.calls.whole) == (text, ())


def test_half_a_call_is_none():
    answer = ToolAnswer(HERMES, "call_")
    answer.take(['<tool_call>{"name": "clock", "arguments": {"a": '])
    answer.finish()
    assert (answer.text, answer.calls.whole) == ("", ())
