"""Text from outside, for a terminal or a log."""

import pytest

from trioengine.core.bounds import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("over\rwritten\r\n", "overwritten\n"),
        ("\x00\x7f", r"\x00\x7f"),
        ("\x80\x9b31m\x9f", r"\x80\x9b31m\x9f"),
        ("\ud800", r"\ud800"),
        ("abc\u202edcb\u2066x\u2069", r"abc\u202edcb\u2066x\u2069"),
        ("\u2028", r"\u2028"),
        ("é日本😀 \N{NO-BREAK SPACE}👩\u200d🚀 \u200f", "é日本😀 \N{NO-BREAK SPACE}👩\u200d🚀 \u200f"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text, shown):
    assert printable_lines(text) == shown


def test_on_one_line():
    assert printable("one\ntwo\r\tthree\u202e") == r"one\ntwo\r\tthree\u202e"
