"""A line of callers who wait, served in the order of their arrival.

What they wait for is handed over: whoever makes it available calls `serve`, which takes it for the first in the line in
that same step, and wakes that one alone. So nobody is overtaken, however often a newcomer asks, and while somebody
waits there is nothing to be had. Who is cancelled leaves the line in the step of the cancellation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import trio

from trioengine.core.errors import EngineAsleep, EngineOverloaded

NOT_NOW = (EngineOverloaded, EngineAsleep)  # what a caller may wait for the end of


@dataclass(slots=True)
class _Waiter:
    admission: Callable[[], object]
    refusal: Exception | None = None


class WaitingLine:
    """Callers with an admission each: a function that takes what they wait for, or raises one of NOT_NOW."""

    def __init__(self) -> None:
        self._waiters: OrderedDict[trio.lowlevel.Task, _Waiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, admission: Callable[[], object]) -> None:
        """Wait until `admission`, called by `serve`, succeeds; raises what it raises, but for NOT_NOW.

        Cancelled, it was not admitted; once it was, this is not cancelled any more.
        """
        task = trio.lowlevel.current_task()
        waiter = self._waiters[task] = _Waiter(admission)

        def leave(_: object) -> trio.lowlevel.Abort:
            del self._waiters[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        if waiter.refusal is not None:
            raise waiter.refusal

    def serve(self) -> None:
        """Admit from the front, until one is told NOT_NOW and so goes on waiting."""
        while self._waiters:
            task, waiter = self._waiters.popitem(last=False)
            try:
                waiter.admission()
            except NOT_NOW:
                self._waiters[task] = waiter
                self._waiters.move_to_end(task, last=False)
                return
            except Exception as exc:
                waiter.refusal = exc
            trio.lowlevel.reschedule(task)
