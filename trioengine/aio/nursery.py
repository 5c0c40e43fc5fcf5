"""Nurseries that raise one exception as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


def check_trio() -> None:
    """Raise RuntimeError outside of trio."""
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError("this runs under trio (trio.run); in a notebook or under asyncio use trioengine.blocking")


@asynccontextmanager
async def open_unwrapped_nursery() -> AsyncIterator[trio.Nursery]:
    """`trio.open_nursery`, but one exception (be it raised by several tasks) is not wrapped in the nursery's group.

    Cancellations beside it do not count: the failure is raised whether or not the scope was left anyway. A group that
    the body itself raised stays a group, and the exception keeps its cause and its context.
    """
    check_trio()
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        failures = group.split(trio.Cancelled)[1]
        if failures is None or any(other is not failures.exceptions[0] for other in failures.exceptions):
            raise
        error = failures.exceptions[0]
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context
            del error, failures, group  # no cycle through this frame
