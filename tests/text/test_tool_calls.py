"""Tool calls in answers, in any pieces."""

import json
import random

import pytest

from trioengine.text.tool_calls import FORMS, CallArguments, CallBegin, ToolCallParser

A = {"city": 'Par"is}', "days": [1, {"x": "\\"}]}
CALL = json.dumps({"name": "weather", "arguments": A})
OTHER = json.dumps({"arguments": {}, "name": "time"})
BAD_ESCAPE = '<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>'
LINE_END = '<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>'
ANSWERS = [
    ("hermes", "just text", ["just text"]),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", [("weather", A)]),
    (
        "hermes",
        f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>",
        ["I look.", ("weather", A), ("time", {})],
    ),
    ("hermes", "a < b <tool> <tool_call", ["a < b <tool> <tool_call"]),
    ("hermes", "<tool_call>\nno json\n</tool_call>", ["<tool_call>\nno json\n</tool_call>"]),
    ("hermes", f"<tool_call>\n{OTHER}", [("time", {})]),
    ("json", f" {CALL}", [("weather", A)]),
    ("json", f"Here: {CALL}", [f"Here: {CALL}"]),
    ("json", '{"a": 1}', ['{"a": 1}']),
    ("json", OTHER, [("time", {})]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
    ("json", "  ", ["  "]),
    ("hermes", "a <tool_call> b", ["a <tool_call> b"]),
    (
        "hermes",
        f"a\n<tool_call>{{}}</tool_call> b <tool_call>{CALL}</tool_call>",
        ["a\n<tool_call>{}</tool_call> b", ("weather", A)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 7}</tool_call>\nand then'
        f"<tool_call>{OTHER}</tool_call> bye",
        [("f", {"a": 1}), "\nand then", ("time", {}), " bye"],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} bye', [("f", {}), " bye"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n', [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', [("f", {})]),
    ("hermes", f"<tool_call>{OTHER}\n</tool_c", [("time", {})]),
    ("hermes", "<tool_call>no json\n</tool_c", ["<tool_call>no json\n</tool_c"]),
    (
        "hermes",
        '<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>'],
    ),
    (
        "hermes",
        '<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>'],
    ),
    ("hermes", '<tool_call>{"x": ' + "[" * 5000, ['<tool_call>{"x": ' + "[" * 5000]),
    ("hermes", '<tool_call>{"name": "' + "a" * 300 + '", "arguments": {}}</tool_call>', [("a" * 300, {})]),
    ("llama3", '{"name": "f", "parameters": {}, "type": "function"} hello', [("f", {}), " hello"]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
    ("json", '{"name": "f", "arguments": {"a": 1}]}}', [("f", {"a": 1}), "}"]),
    ("hermes", f"<tool_call>{OTHER}</tool_call>\n \n", [("time", {})]),
    ("hermes", "a \n", ["a \n"]),
]


def gathered(parts):
    """Texts joined, and calls with their arguments."""
    found = []
    for part in parts:
        match part:
            case CallBegin(name):
                found.append((name, ""))
            case CallArguments(text):
                found[-1] = (found[-1][0], found[-1][1] + text)
            case _ if found and isinstance(found[-1], str):
                found[-1] += part
            case _:
                found.append(part)
    return [(each[0], json.loads(each[1])) if isinstance(each, tuple) else each for each in found]


@pytest.mark.parametrize(("form", "answer", "expected"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers_in_any_pieces(form, answer, expected):
    rng = random.Random(0)
    for _ in range(50):
        parser = ToolCallParser(FORMS[form])
        parts, at = [], 0
        while at < len(answer):
            size = rng.choice((1, 1, 2, 3, 7, 100))
            parts += parser.feed(answer[at : at + size])
            at += size
        parts += parser.finish()
        assert gathered(parts) == expected
        assert parser.num_calls == sum(isinstance(each, tuple) for each in expected)


def test_arguments_come_as_they_are_written():
    parser = ToolCallParser(FORMS["hermes"])
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": {"a"') == [CallBegin("f"), CallArguments('{"a"')]
    assert parser.feed(": 1}") == [CallArguments(": 1}")]
    assert parser.feed("}\n</tool_call>") == []


def test_an_answer_that_is_cut_in_its_arguments():
    parser = ToolCallParser(FORMS["hermes"])
    parts = parser.feed('<tool_call>\n{"name": "f", "arguments": {"a": "xy') + parser.finish()
    assert parts == [CallBegin("f"), CallArguments('{"a": "xy')]
