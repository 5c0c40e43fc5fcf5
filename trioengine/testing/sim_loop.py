"""trio, a scheduler pass at a time, under the hand of a synchronous caller.

Guest mode lets a host run trio's loop. A keeper task that is always runnable keeps trio from ever waiting for I/O in a
thread, so that every callback it queues is exactly one scheduler pass; the clock is a MockClock, and which of the
runnable tasks goes first is given as data. No thread, no I/O, no wall clock: the same calls give the same steps.

The one private name is `trio._core._run._r`, the random generator that trio itself registers with hypothesis in order
to be deterministic under it; `tests/testing/test_sim_loop.py` says so if it changes.
"""

from __future__ import annotations

import itertools
import math
import traceback
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 -- its import makes trio sort runnable tasks before it shuffles them
import trio
import trio.testing
from outcome import Outcome
from trio._core import _run

FIFO = (0,)
_TRIO = str(Path(trio.__file__).parent)


class Livelock(AssertionError):
    """Tasks go on and on, and nothing from outside makes them."""


class SimLoop(trio.abc.Instrument):
    """One run of trio. Crashes of tasks are collected in `crashes`; close it in the end."""

    def __init__(self) -> None:
        self.clock = trio.testing.MockClock()
        self.crashes: list[Exception] = []
        self.passes = 0
        self.steps = 0  # of tasks
        self.trace = 0  # a checksum over the names of all tasks that ran, in order
        self._todo: deque[Callable[[], object]] = deque()
        self._picks = _Picks()
        self._keeper: trio.lowlevel.Task | None = None
        self._keeping = True
        self._outcome: Outcome[None] | None = None
        self._random, _run._r = _run._r, self._picks  # type: ignore[assignment]
        trio.lowlevel.start_guest_run(
            self._root,
            run_sync_soon_threadsafe=self._todo.append,
            done_callback=self._end,
            host_uses_signal_set_wakeup_fd=True,
            clock=self.clock,
            instruments=[self],
        )
        while self._keeper is None:
            self._pass()

    def _end(self, outcome: Outcome[None]) -> None:
        self._outcome = outcome

    def _pass(self) -> None:
        if self._outcome is not None:
            self._outcome.unwrap()
            raise RuntimeError("the loop is over")
        self._todo.popleft()()

    async def _root(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self._keeper = trio.lowlevel.current_task()
            while self._keeping:
                await trio.lowlevel.cancel_shielded_checkpoint()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is not self._keeper:
            self.steps += 1
            self.trace = zlib.crc32(task.name.encode(), self.trace)

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any, name: str) -> None:
        """Start a task; its crash is collected, and disturbs nobody."""
        self.nursery.start_soon(self._guard, function, args, name=name)

    async def _guard(self, function: Callable[..., Awaitable[Any]], args: Sequence[Any]) -> None:
        try:
            await function(*args)
        except Exception as exc:
            self.crashes.append(exc)

    def tick(self, picks: Iterable[int] = FIFO) -> None:
        """One pass for each pick. A pick says which runnable task goes first, in order of their start; 0 is FIFO."""
        for pick in picks:
            self._picks.first = pick
            self._pass()
            self.passes += 1
        self._picks.first = 0

    def settle(self, limit: int = 2000) -> int:
        """Passes until every task is blocked; how many of them did something. Livelock after `limit`."""
        for count in range(limit):
            before = self.steps
            self.tick()
            if self.steps == before:
                return count
        raise Livelock(f"tasks were still running after {limit} passes:\n{self.stacks()}")

    def seconds_to_next_deadline(self) -> float:
        """On the simulated clock; infinite when nobody waits for a time."""
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
            for _ in range(limit):
                if self._outcome is not None:
                    return
                if self.idle:
                    self._keeping = False
                elif 0.0 < self.seconds_to_next_deadline() < math.inf:
                    self.clock.jump(self.seconds_to_next_deadline())
                self._pass()
            stacks = self.stacks()
            _run.GLOBAL_RUN_CONTEXT.__dict__.clear()  # given up: the next loop can start
            raise Livelock(f"tasks did not end when cancelled:\n{stacks}")
        finally:
            _run._r = self._random


class _Picks:
    """What trio believes to be random; it takes tasks from the end of the batch that it has shuffled."""

    def __init__(self) -> None:
        self.first = 0

    def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:
        keeper, *others = batch  # in the order of their start; the keeper can always run, and was the first
        if others:
            first = self.first % len(others)
            others = [*others[first:], *others[:first]]
        batch[:] = [keeper, *others][::-1]


def _tasks_below(nursery: trio.Nursery) -> list[trio.lowlevel.Task]:
    children = sorted(nursery.child_tasks, key=lambda task: task.name)
    below = (_tasks_below(inner) for task in children for inner in task.child_nurseries)
    return [*children, *itertools.chain.from_iterable(below)]


def _stack(task: trio.lowlevel.Task) -> str:
    frames = traceback.StackSummary.extract(iter(list(task.iter_await_frames())))
    ours = [frame for frame in frames if not frame.filename.startswith(_TRIO)]
    return "".join(traceback.format_list(ours))
