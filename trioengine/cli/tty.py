"""The terminal: when typed keys are shown, and text of printable characters in lines that break at words.

trio and rich are not imported with it, so that keys can be hidden before those imports.
"""

from __future__ import annotations

import json
import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from trioengine.core.wording import UNPRINTABLE, printable_lines

STDIN = 0
_LOCAL_FLAGS = 3  # their index in the settings
_TAB_STOP = 8
_COLUMNS = 80  # of a terminal that does not report its size
_ESCAPES = {code: f"\\u{code:04x}" for code in UNPRINTABLE}


def on_terminal() -> bool:
    """Whether standard input and output are a terminal."""
    return os.isatty(STDIN) and sys.stdout.isatty()


@contextmanager
def hide_keys() -> Iterator[None]:
    """Keep the keys typed during the block, and do not show them, if standard input and output are a terminal.

    They do not mix with an answer, and the editor of the next line gets and shows all of them, Ctrl+D as well.
    """
    if not on_terminal():
        yield
        return
    with restore_terminal():
        _change_settings(off=termios.ECHO | termios.ICANON)
        yield


@contextmanager
def keep_keys_at_interrupt() -> Iterator[None]:
    """Ctrl+C during the block does not discard the keys that were typed and not yet read."""
    with restore_terminal():
        _change_settings(on=termios.NOFLSH)
        yield


def show_keys(*, edited_by_terminal: bool) -> None:
    """Show the keys from now on: for an editor of lines in this process, or for the terminal's own."""
    _change_settings(on=termios.ECHO | (termios.ICANON if edited_by_terminal else 0))


@contextmanager
def restore_terminal() -> Iterator[None]:
    """Restore the terminal's settings after the block."""
    settings = termios.tcgetattr(STDIN)
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSANOW, settings)


def _change_settings(*, off: int = 0, on: int = 0) -> None:
    settings = termios.tcgetattr(STDIN)
    settings[_LOCAL_FLAGS] = settings[_LOCAL_FLAGS] & ~off | on
    termios.tcsetattr(STDIN, termios.TCSANOW, settings)


def json_line(content: object) -> str:
    """The content as JSON on one line; control characters are escaped, other characters are not."""
    return json.dumps(content, ensure_ascii=False).translate(_ESCAPES) + "\n"


def wrapped(text: str, stream: TextIO) -> str:
    """A whole text for a stream that is a terminal."""
    screen = Screen(stream)
    return screen.feed(text) + screen.flush()


class Screen:
    """Makes text that comes in pieces printable, and wraps it for a stream that is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._wrap = WordWrap(lambda: _columns(stream))

    def feed(self, text: str) -> str:
        """The part of the text that can be written now."""
        return self._wrap.feed(printable_lines(text))

    def flush(self) -> str:
        """The rest."""
        return self._wrap.flush()

    def end_line(self) -> str:
        """The rest of a text that was cut off, and a newline if its last line has begun."""
        return self._wrap.end_line()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except OSError:
        return _COLUMNS


class WordWrap:
    """Breaks text that comes in pieces into lines of at most `width()` columns, at words where it can.

    The last word of a piece is held back until its end has come.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        from rich.cells import get_character_cell_size

        self._cells_of = get_character_cell_size
        self._width = width
        self._column = 0  # after the written text
        self._space = ""  # between the written text and the word
        self._word = ""
        self._cells = 0  # columns of the word

    def feed(self, text: str) -> str:
        """The text up to its last complete word, with line breaks."""
        width = self._width()
        return "".join(self._take(character, width) for character in text)

    def flush(self) -> str:
        """The rest of the text, which has ended."""
        rest = self._end_word(self._width()) + self._space
        self._space, self._column = "", 0
        return rest

    def end_line(self) -> str:
        """The rest of the text, and a newline if its last line has begun."""
        is_begun = self._column > 0 or bool(self._word)
        return self.flush() + ("\n" if is_begun else "")

    def _take(self, character: str, width: int) -> str:
        if character == "\n":
            line = self._end_word(width) + "\n"
            self._space, self._column = "", 0
            return line
        if character in " \t":
            word = self._end_word(width)
            self._space += character
            return word
        cells = self._cells_of(character)
        before = self._end_word(width) if cells == 2 else ""  # a line may break before and after a wide character
        self._word += character
        self._cells += cells
        return before + (self._end_word(width) if cells == 2 or self._cells >= width else "")

    def _end_word(self, width: int) -> str:
        if not self._word:
            return ""
        end = _advanced(self._column, self._space) + self._cells
        if end > width and self._column > 0:
            text, end = f"\n{self._word}", self._cells
        else:
            text = self._space + self._word
        self._space, self._word, self._cells, self._column = "", "", 0, end
        return text


def _advanced(column: int, space: str) -> int:
    for character in space:
        column += 1 if character == " " else _TAB_STOP - column % _TAB_STOP
    return column
