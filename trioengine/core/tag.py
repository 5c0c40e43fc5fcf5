"""What an engine gives back when it sleeps, and takes again when it wakes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Literal, TypeAlias


class Tag(enum.StrEnum):
    """A part of the worker's memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


TagName: TypeAlias = Literal["weights", "kv_cache"] | Tag
ALL_TAGS = frozenset(Tag)


def sorted_tags(tags: Iterable[Tag]) -> tuple[Tag, ...]:
    """By their names, as they are said on the wire."""
    return tuple(sorted(tags, key=lambda tag: tag.value))
