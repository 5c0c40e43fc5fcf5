"""The rule for text from outside that reaches a terminal or a log: nothing in it is obeyed, all of it is shown."""

from __future__ import annotations

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_LINE_SEPARATORS = (0x2028, 0x2029)
_BIDI_OVERRIDES = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # embeddings and isolates, too
_SURROGATES = range(0xD800, 0xE000)  # JSON can hold lone ones; UTF-8 cannot

UNPRINTABLE = frozenset((*_CONTROLS, *_LINE_SEPARATORS, *_BIDI_OVERRIDES, *_SURROGATES))  # code points
_ESCAPES = {code: repr(chr(code))[1:-1] for code in UNPRINTABLE}
_ESCAPES_IN_LINES = _ESCAPES | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def printable(text: str) -> str:
    """The text on one line: control characters, line ends and bidi overrides are escaped, as in Python's repr."""
    return text.translate(_ESCAPES)


def printable_lines(text: str) -> str:
    """The same for text of several lines: newlines and tabs are kept, and carriage returns left out."""
    return text.translate(_ESCAPES_IN_LINES)
