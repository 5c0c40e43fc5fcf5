"""The name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?` for the nearest known name, with the prefix before it, or nothing if none is near."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""
