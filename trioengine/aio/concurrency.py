"""Structured concurrency beyond trio's own: an unwrapped nursery, deadlines of calls, a broadcast wake-up."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from trioengine.core.checks import number, rejected
from trioengine.core.errors import TimedOut
from trioengine.core.types import Completion
from trioengine.core.wording import brief, counted


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


@dataclass(frozen=True, slots=True)
class Deadline:
    """The deadline of a call, `timeout` seconds after it began: `at` on trio's clock."""

    at: float = math.inf
    timeout: float = math.inf

    def passed(self, progress: str, completion: Completion | None = None) -> TimedOut:
        """The error of a call that the deadline ended. `progress` completes the message: "while waiting: …"."""
        return TimedOut(f"timed out after {self.timeout:g} s {progress}", completion=completion)

    def passed_by(self, completion: Completion) -> TimedOut:
        """The error of a request that the deadline ended while it was running."""
        if not completion.text:
            return self.passed("before any text", completion)
        came = counted(len(completion.text), "character")
        return self.passed(f"with {came} of the answer, which .completion holds", completion)


NEVER = Deadline()


def deadline_after(timeout: float | None) -> Deadline:
    """The deadline `timeout` seconds from now; NEVER for None. Raises RequestRejected for an invalid timeout."""
    if timeout is None:
        return NEVER
    try:
        seconds = number(timeout, 0, math.inf, above=True)
    except ValueError:
        raise rejected("timeout", f"must be positive seconds, got {brief(timeout)}") from None
    return Deadline(trio.current_time() + seconds, seconds)


class Notifier:
    """A broadcast wake-up: `while not condition: await changed.wait()`; a change calls `notify` in the same step."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = trio.Event()

    def notify(self) -> None:
        """Wake every task that waits."""
        self._next.set()

    async def wait(self) -> None:
        """Wait until the next `notify`."""
        if self._next.is_set():
            self._next = trio.Event()
        await self._next.wait()
