"""The name that was probably meant, for a message about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_COMPARED = 80  # characters: the comparison takes their square


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean 'x'?` with the nearest known name, after the prefix; empty if none is near."""
    nearest = difflib.get_close_matches(name[:_COMPARED], sorted(known), n=1)
    return f"; did you mean {prefix + nearest[0]!r}?" if nearest else ""
