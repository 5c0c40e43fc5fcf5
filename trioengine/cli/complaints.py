"""Lines on stderr in the middle of a command, which goes on where nobody reads them."""

from __future__ import annotations

import sys
from contextlib import suppress


def complain(text: str, *, before: str = "") -> None:
    """One line; `before` it comes what ends another."""
    with suppress(OSError):
        print(f"{before}trioengine: {text}", file=sys.stderr, flush=True)
