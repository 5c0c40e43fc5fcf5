"""Lines on stderr in the middle of a command, which goes on where nobody reads them."""

from __future__ import annotations

import sys
from contextlib import suppress

from trioengine.core.bounds import printable_lines


def complain(text: str, *, before: str = "") -> None:
    """Write a line to stderr; `before` ends the line before it."""
    with suppress(OSError):
        print(f"{before}{_shown(f'trioengine: {text}')}", file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    """Printable, and on a terminal in lines that break at words."""
    if not sys.stderr.isatty():
        return printable_lines(text)
    from trioengine.cli.screen import wrapped  # with rich, which `--help` and `doctor` do without

    return wrapped(text, sys.stderr)
