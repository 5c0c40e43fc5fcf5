"""The keys that are typed on a terminal: when they are shown, and that none is lost."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

STDIN = 0
_LOCAL_FLAGS = 3  # their place among the settings


def on_terminal() -> bool:
    """Whether a user types, and reads the answers."""
    return os.isatty(STDIN) and sys.stdout.isatty()


@contextmanager
def hide_keys() -> Iterator[None]:
    """Keys are kept and not shown in the body, if standard input and output are a terminal.

    They are not mixed with an answer, and the editor of the next line gets and shows all of them, Ctrl+D as well.
    """
    if not on_terminal():
        yield
        return
    with restore_terminal():
        _change(off=termios.ECHO | termios.ICANON)
        yield


@contextmanager
def keep_keys_at_interrupt() -> Iterator[None]:
    """Ctrl+C in the body does not discard the keys that were typed and not yet read."""
    with restore_terminal():
        _change(on=termios.NOFLSH)
        yield


def show_keys(*, edited_by_terminal: bool) -> None:
    """Show the keys from now on: for an editor of lines in this process, or for the terminal's own."""
    _change(on=termios.ECHO | (termios.ICANON if edited_by_terminal else 0))


@contextmanager
def restore_terminal() -> Iterator[None]:
    """After the body the terminal has the settings that it had before."""
    settings = termios.tcgetattr(STDIN)
    try:
        yield
    finally:
        termios.tcsetattr(STDIN, termios.TCSANOW, settings)


def _change(*, off: int = 0, on: int = 0) -> None:
    settings = termios.tcgetattr(STDIN)
    settings[_LOCAL_FLAGS] = settings[_LOCAL_FLAGS] & ~off | on
    termios.tcsetattr(STDIN, termios.TCSANOW, settings)
