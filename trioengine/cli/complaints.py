"""Lines on stderr in the middle of a command, which goes on where nobody reads them."""

from __future__ import annotations

import sys
from contextlib import suppress

from trioengine.cli.screen import fitted


def complain(text: str, *, before: str = "") -> None:
    """Write a line to stderr; `before` ends the line before it."""
    with suppress(OSError):
        print(f"{before}{fitted(f'trioengine: {text}', sys.stderr)}", file=sys.stderr, flush=True)
