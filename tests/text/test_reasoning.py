"""Reasoning in answers, in any pieces."""

import random

import pytest

from trioengine.text.reasoning import REASONING_FORMS, AnswerForm, AnswerParser, Reasoning
from trioengine.text.tool_calls import HERMES, CallArguments, CallBegin

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THINK = REASONING_FORMS["qwen3"]
OPEN, CLOSED = "user: a\nassistant: <think>\n", "user: <think> a\nassistant: "
ANSWERS = [  # the prompt, the answer, its reasoning, its text, the number of calls, the characters of the reasoning
    (CLOSED, "plain", "", "plain", 0, 0),
    (CLOSED, "", "", "", 0, 0),
    (CLOSED, "\n", "", "\n", 0, 0),
    (CLOSED, "a <think>b</think>", "", "a <think>b</think>", 0, 0),
    (CLOSED, "<think>why</think>\n\nso", "why", "\n\nso", 0, 18),
    (CLOSED, "\n<think>\nw</th </think>", "\nw</th ", "", 0, 23),
    (CLOSED, "<think>why", "why", "", 0, None),
    (CLOSED, "<think>why</thin", "why</thin", "", 0, None),
    (CLOSED, "<think>", "", "", 0, None),
    (CLOSED, "<thin", "", "<thin", 0, 0),
    (CLOSED, "<think></think>a", "", "a", 0, 15),
    (CLOSED, "<think>a</think>b</think>c", "a", "b</think>c", 0, 16),
    (OPEN, "why</think>so", "why", "so", 0, 11),
    (OPEN, "why", "why", "", 0, None),
    (OPEN, "<thi", "<thi", "", 0, None),
    (OPEN, "<think>why</think>so", "why", "so", 0, 18),
    (OPEN, "</think>so", "", "so", 0, 8),
    (CLOSED, f"<think>{CALL}</think>so", CALL, "so", 0, 15 + len(CALL)),
    (OPEN, f"why</think>so\n{CALL}", "why", "so", 1, 11),
    (CLOSED, f"so\n{CALL}", "", "so", 1, 0),
]


@pytest.mark.parametrize(("prompt", "answer", "reasoning", "text", "num_calls", "count"), ANSWERS)
def test_answers_in_any_pieces(prompt, answer, reasoning, text, num_calls, count):
    rng = random.Random(0)
    for _ in range(50):
        parser = AnswerParser(AnswerForm(HERMES, THINK), in_reasoning=THINK.is_open_after(prompt, ""))
        parts, at = [], 0
        while at < len(answer):
            size = rng.choice((1, 1, 2, 3, 7, 100))
            parts += parser.feed(answer[at : at + size])
            at += size
        parts += parser.finish()
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reasoning
        assert "".join(part for part in parts if isinstance(part, str)) == text
        assert [part for part in parts if isinstance(part, CallBegin)] == [CallBegin("f")] * num_calls
        assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"a": 1}' * num_calls
        assert (parser.has_calls, parser.num_reasoning_characters) == (num_calls > 0, count)


def test_reasoning_comes_as_it_is_written():
    parser = AnswerParser(AnswerForm(reasoning=REASONING_FORMS["deepseek_r1"]))
    assert parser.feed("<thi") == []
    assert parser.feed("nk>why") == [Reasoning("why")]
    assert parser.feed(" not</") == [Reasoning(" not")]
    assert parser.feed("think>so") == ["so"]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("continued", "is_open"),
    [("", False), ("<think>\nhm", True), ("<think>hm</think>", False), ("hm", False), ("</think><think>", True)],
)
def test_a_message_that_goes_on(continued, is_open):
    assert THINK.is_open_after(f"assistant: {continued}", continued) is is_open
