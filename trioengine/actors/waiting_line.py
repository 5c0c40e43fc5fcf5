"""A line of callers who wait, served in the order of their arrival.

The object of the wait is handed over: the task that makes it available calls `serve`, which takes it for the first in
the line in that same step, and wakes that one alone. So no caller is overtaken, however often a newcomer asks, and
while one waits there is nothing to be had. A cancelled caller leaves the line in the step of the cancellation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import trio

from trioengine.actors.observer import Observer
from trioengine.core.errors import EngineAsleep, EngineOverloaded

NOT_NOW = (EngineOverloaded, EngineAsleep)  # refusals whose end a caller may wait for


def waits_for(refusal: Exception, wait: bool | None) -> bool:
    """Whether a caller waits for the end of this refusal.

    `wait` True: of all that passes, also of a restart or a sleep; None: only for a free slot; False: never.
    """
    is_full = isinstance(refusal, EngineOverloaded) and refusal.is_full
    return is_full if wait is None else wait and isinstance(refusal, NOT_NOW)


@dataclass(slots=True)
class _Waiter:
    admission: Callable[[], object]
    wait: bool | None
    refusal: Exception | None = None


class WaitingLine:
    """Callers with an admission each: a function that takes a slot, or raises one of NOT_NOW while it cannot."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self._waiters: OrderedDict[trio.lowlevel.Task, _Waiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, admission: Callable[[], object], *, wait: bool | None = True) -> None:
        """Wait until `admission`, called by `serve`, succeeds; raises each refusal that `wait` does not wait out.

        Cancelled, it was not admitted; once it was, this is not cancelled any more.
        """
        task = trio.lowlevel.current_task()
        waiter = self._waiters[task] = _Waiter(admission, wait)
        for observer in self._observers:
            observer.line_joined(self)

        def leave(_: object) -> trio.lowlevel.Abort:
            del self._waiters[task]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)
        if waiter.refusal is not None:
            raise waiter.refusal

    def serve(self) -> None:
        """Admit from the front, until one is refused and goes on waiting; refuse those that do not wait for this."""
        while self._waiters:
            task, waiter = self._waiters.popitem(last=False)
            try:
                self._admit(task, waiter)
            except Exception as exc:
                if waits_for(exc, waiter.wait):
                    self._waiters[task] = waiter
                    self._waiters.move_to_end(task, last=False)
                    self._refuse(exc)
                    return
                waiter.refusal = exc
            trio.lowlevel.reschedule(task)

    def _admit(self, task: trio.lowlevel.Task, waiter: _Waiter) -> None:
        for observer in self._observers:
            observer.line_serving(self, task)
        is_admitted = False
        try:
            waiter.admission()
            is_admitted = True
        finally:
            for observer in self._observers:
                observer.line_served(self, task, is_admitted=is_admitted)

    def num_refusable(self, refusal: Exception) -> int:
        """How many wait that do not wait for the end of this."""
        return sum(not waits_for(refusal, waiter.wait) for waiter in self._waiters.values())

    def _refuse(self, refusal: Exception) -> None:
        """Refuse those behind the first one that do not wait for the end of this."""
        if waits_for(refusal, None):  # all wait for a slot
            return
        for task, waiter in list(self._waiters.items()):
            if not waits_for(refusal, waiter.wait):
                del self._waiters[task]
                waiter.refusal = copy(refusal)
                trio.lowlevel.reschedule(task)
