"""A nursery out of which a single exception comes as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_unwrapped_nursery() -> AsyncIterator[trio.Nursery]:
    """`trio.open_nursery`, but one exception (be it raised by several tasks) is not wrapped in the nursery's group.

    A group that the body itself raised stays a group, and the exception keeps its cause and its context.
    """
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        error = group.exceptions[0]
        if any(other is not error for other in group.exceptions):
            raise
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context
            del error, group  # no cycle through this frame
