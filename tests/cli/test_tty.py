"""Text of a model or a server on a terminal: broken at words, and without control characters."""

import pytest

from trioengine.cli.tty import WordWrap


def wrapped(text, width, size=1):
    """The text, wrapped piece by piece."""
    wrap = WordWrap(lambda: width)
    pieces = [wrap.feed(text[start : start + size]) for start in range(0, len(text), size)]
    return "".join([*pieces, wrap.flush()])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("one two three", 20, "one two three"),
        ("one two three", 7, "one two\nthree"),
        ("one two three", 8, "one two\nthree"),
        ("one  two", 3, "one\ntwo"),
        ("    code\n  more", 10, "    code\n  more"),
        ("a\n\n\nb", 4, "a\n\n\nb"),
        ("abcdefghij k", 4, "abcd\nefgh\nij k"),
        ("ab abcdef", 4, "ab\nabcd\nef"),
        ("日本語です", 4, "日本\n語で\nす"),
        ("a\tb", 8, "a\nb"),
        ("a\tb", 9, "a\tb"),
        ("trailing  ", 20, "trailing  "),
    ],
)
def test_lines_break_at_words(text, width, shown, size):
    assert wrapped(text, width, size) == shown


def test_a_word_is_shown_when_it_is_complete():
    wrap = WordWrap(lambda: 10)
    assert [wrap.feed(piece) for piece in ("on", "e", " two", " ")] == ["", "", "one", " two"]


def test_a_terminal_may_get_another_width():
    widths = iter([10, 3])
    wrap = WordWrap(lambda: next(widths))
    assert wrap.feed("one ") + wrap.feed("two ") == "one\ntwo"
