"""trio, a scheduler pass at a time, under the hand of a synchronous caller.

Guest mode lets a host run trio's loop. The clock leaves no time to wait for I/O in a thread, so that
every callback that trio queues is exactly one scheduler pass; and which of the runnable tasks goes first is given as
data. No thread, no I/O, no wall clock: the same calls give the same steps.

The one private name that a loop needs is `trio._core._run._r`, the random generator that trio itself registers with
hypothesis in order to be deterministic under it; `tests/testing/test_sim_loop.py` fails if it changes. (To end a task
that does not want to end takes three more, in `_give_up`.)
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import traceback
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis  # noqa: F401 -- its import makes trio sort runnable tasks before it shuffles them
import trio
from outcome import Error, Outcome, Value
from trio._core import _run

FIFO = (0,)
_TRIO = str(Path(trio.__file__).parent)


class Livelock(AssertionError):
    """Tasks go on and on, and nothing from outside makes them."""


class SimulatedClock(trio.abc.Clock):
    """A clock that starts at 0 and moves by `jump` alone."""

    def __init__(self) -> None:
        self._now = 0.0

    def start_clock(self) -> None:
        """It runs by hand."""

    def current_time(self) -> float:
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """None at all, whatever the deadline: the loop goes on with its next pass."""
        return 0.0

    def jump(self, seconds: float) -> None:
        """Time passes. ValueError if it would go backwards."""
        if seconds < 0.0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds


class SimLoop:
    """One run of trio. Crashes of tasks are collected in `crashes`; close it in the end."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.crashes: list[Exception] = []
        self.passes = 0
        self._todo: deque[Callable[[], object]] = deque()
        self._picks = _Picks()
        self._root_task: trio.lowlevel.Task | None = None
        self._outcome: Outcome[None] | None = None
        trio.lowlevel.start_guest_run(
            self._root,
            run_sync_soon_threadsafe=self._todo.append,
            done_callback=self._end,
            host_uses_signal_set_wakeup_fd=True,
            clock=self.clock,
        )
        self._random, _run._r = _run._r, self._picks  # type: ignore[assignment]
        while self._root_task is None:
            self._pass()

    def _end(self, outcome: Outcome[None]) -> None:
        self._outcome = outcome

    def _pass(self) -> None:
        if self._outcome is not None:
            self._unwrap()
            raise RuntimeError("the loop is over")
        self._todo.popleft()()

    def _unwrap(self) -> None:
        """Raise the error of the run, once. trio delivers a KeyboardInterrupt to a task, perhaps in a group."""
        outcome, self._outcome = self._outcome, Value(None)
        if isinstance(outcome, Error):
            interrupts = (KeyboardInterrupt, SystemExit)
            if isinstance(outcome.error, BaseExceptionGroup) and outcome.error.subgroup(interrupts):
                raise KeyboardInterrupt
            raise outcome.error

    async def _root(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self._root_task = trio.lowlevel.current_task()
            await trio.sleep_forever()

    @property
    def steps(self) -> int:
        """Of tasks, until now."""
        return len(self._picks.names)

    @property
    def trace(self) -> int:
        """A checksum over the names of all tasks that ran, in order."""
        return zlib.crc32(";".join(self._picks.names).encode())

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any, name: str) -> None:
        """Start a task; its crash is collected, and does not disturb the others."""
        self.nursery.start_soon(self._guard, function, args, name=name)

    async def _guard(self, function: Callable[..., Awaitable[Any]], args: Sequence[Any]) -> None:
        try:
            await function(*args)
        except Exception as exc:
            self.crashes.append(exc)

    def tick(self, picks: Iterable[int] = FIFO) -> None:
        """Run one pass for each pick: the index, in order of their start, of the runnable task that goes first."""
        for pick in picks:
            self._picks.first = pick
            self._pass()
            self.passes += 1
        self._picks.first = 0

    def settle(self, limit: int = 2000) -> None:
        """Passes until every task is blocked. Livelock after `limit`."""
        for _ in range(limit):
            before = self.steps
            self.tick()
            if self.steps == before:
                return
        raise Livelock(f"tasks were still running after {limit} passes:\n{self.stacks()}")

    def seconds_to_next_deadline(self) -> float:
        """On the simulated clock; infinite without a deadline."""
        return trio.lowlevel.current_statistics().seconds_to_next_deadline

    def stacks(self) -> str:
        """Where every task waits."""
        return "\n".join(f"{task.name}:\n{_stack(task)}" for task in _tasks_below(self.nursery))

    @property
    def idle(self) -> bool:
        """Whether no task is left."""
        return not self.nursery.child_tasks

    def close(self, limit: int = 5000) -> None:
        """Cancel everything, and run to the end. Livelock if that takes more than `limit` passes."""
        try:
            if self._outcome is None:
                self.nursery.cancel_scope.cancel()
            if self._ends_within(limit):
                self._unwrap()
                return
            stacks = self.stacks()
            self._give_up(limit)
            raise Livelock(f"tasks did not end when cancelled:\n{stacks}")
        finally:
            _run._r = self._random

    def _ends_within(self, limit: int) -> bool:
        for _ in range(limit):
            if self._outcome is not None:
                return True
            if 0.0 < self.seconds_to_next_deadline() < math.inf:
                self.clock.jump(self.seconds_to_next_deadline())
            self._pass()
        return False

    def _give_up(self, limit: int) -> None:
        """End tasks that swallow their cancellation by an exception that they cannot catch, so that trio's run ends."""
        for _ in range(limit):
            guest = self._todo[0].__self__  # type: ignore[attr-defined]
            for task in guest.runner.runq:
                if task is not self._root_task and task is not guest.runner.init_task:
                    task._next_send_fn, task._next_send = task.coro.throw, _GivenUp()
            if self._ends_within(1) or self._outcome is not None:
                return
        raise RuntimeError(f"a task cannot be ended:\n{self.stacks()}")


class _GivenUp(BaseException):
    """Ends a task."""


class _Picks:
    """Stands for trio's random numbers; trio takes tasks from the end of the batch that it has shuffled."""

    def __init__(self) -> None:
        self.first = 0
        self.names: list[str] = []  # of the tasks that took a step

    def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:
        if not batch:
            return
        first = self.first % len(batch)
        batch[:] = [*batch[first:], *batch[:first]]  # they were in the order of their start
        self.names += [task.name for task in batch]
        batch.reverse()


def _tasks_below(nursery: trio.Nursery) -> list[trio.lowlevel.Task]:
    children = sorted(nursery.child_tasks, key=lambda task: task.name)
    below = (_tasks_below(inner) for task in children for inner in task.child_nurseries)
    return [*children, *itertools.chain.from_iterable(below)]


def _stack(task: trio.lowlevel.Task) -> str:
    frames = traceback.StackSummary.extract(_frames(task.coro))
    ours = [frame for frame in frames if not frame.filename.startswith(_TRIO)]
    return "".join(traceback.format_list(ours))


def _frames(awaited: Any) -> Iterator[tuple[FrameType, int]]:
    """The frames of a coroutine and of all that it awaits; `Task.iter_await_frames` ends at a whole answer's `Call`."""
    while awaited is not None:
        for kind, awaits in (("cr", "await"), ("gi", "yieldfrom"), ("ag", "await")):
            if hasattr(awaited, f"{kind}_frame"):
                if (frame := getattr(awaited, f"{kind}_frame")) is not None:
                    yield frame, frame.f_lineno
                awaited = getattr(awaited, f"{kind}_{awaits}")
                break
        else:  # an iterator that Python has made of one of these
            found = gc.get_referents(awaited)
            awaited = next((each for each in found if inspect.iscoroutine(each) or inspect.isasyncgen(each)), None)
