"""What an engine gives back when it sleeps, and takes again when it wakes."""

from __future__ import annotations

import enum


class Tag(enum.Enum):
    """A part of the worker's memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


ALL_TAGS = frozenset(Tag)
