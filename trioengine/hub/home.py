"""Where trioengine keeps what it can make or fetch again: models, and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from trioengine.core.errors import ModelError


def trioengine_home() -> Path:
    """$TRIOENGINE_HOME, else `trioengine` in the user's cache directory; ModelError where the user has none."""
    if home := os.environ.get("TRIOENGINE_HOME"):
        return expanded(home).absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else expanded("~/.cache")).absolute() / "trioengine"


def expanded(path: str) -> Path:
    """With the user's home for ~; ModelError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:  # no home directory, or no such user
        raise ModelError(f"{shown(path)}: {exc}") from exc


def shown(text: str) -> str:
    """What a user gave, for an error message."""
    return repr(text if len(text) <= 200 else text[:200] + "…")
