"""trio, a scheduler pass at a time, under the hand of a synchronous caller.

Guest mode lets a host run trio's loop. The clock leaves no time to wait for I/O in a thread, so that
every callback that trio queues is exactly one scheduler pass; and the order in which the runnable tasks go is given as
data. No thread, no I/O, no wall clock: the same calls give the same steps.

`trio.to_thread.run_sync` needs no thread either: its function runs between two passes, `thread_passes` after the call.

A loop needs three private names: `trio._core._run._r`, the random generator that trio itself registers with hypothesis
in order to be deterministic under it, and two functions of `trio._threads`; `tests/testing/test_sim_loop.py` fails if
they change. (To end a task that does not want to end takes three more, in `_give_up`.)
"""

from __future__ import annotations

import gc
import inspect
import itertools
import math
import random
import textwrap
import traceback
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hypothesis  # noqa: F401 -- its import makes trio sort runnable tasks before it shuffles them
import trio
from outcome import Error, Outcome, Value, capture
from trio import _threads
from trio._core import _run

FIFO = 0  # tasks run in the order of their start
WIDTH, MAX_LINES = 120, 4  # of the places in which tasks wait
_TRIO = str(Path(trio.__file__).parent)
_KIT = str(Path(__file__).parent)
_AIO = str(Path(__file__).parents[1] / "aio")  # whose functions are called from many places


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

    def __init__(self, is_users: Callable[[str], bool] = lambda file: False) -> None:
        """`is_users` is true for the files of the user; places are in these where they can be."""
        self.clock = SimulatedClock()
        self._is_users = is_users
        self.crashes: list[Exception] = []
        self.passes = 0
        self._todo: deque[Callable[[], object]] = deque()
        self.thread_passes = 1
        self._order = _Order()
        self._threads: list[_Thread] = []
        self._root_task: trio.lowlevel.Task | None = None
        self._outcome: Outcome[None] | None = None
        trio.lowlevel.start_guest_run(
            self._root,
            run_sync_soon_threadsafe=self._todo.append,
            done_callback=self._end,
            host_uses_signal_set_wakeup_fd=True,
            clock=self.clock,
        )
        self._random, _run._r = _run._r, self._order  # type: ignore[assignment]
        self._threading = {name: vars(_threads)[name] for name in ("start_thread_soon", "_send_message_to_trio")}
        vars(_threads).update(start_thread_soon=self._start_simulated, _send_message_to_trio=_refuse_call_from_thread)
        while self._root_task is None:
            self._pass()

    def _end(self, outcome: Outcome[None]) -> None:
        self._outcome = outcome

    def _pass(self) -> None:
        if self._outcome is not None:
            self._unwrap()
            raise RuntimeError("the loop is over")
        if self._threads:
            self._run_threads()
        self._todo.popleft()()

    def _start_simulated(
        self, function: Callable[[], Any], deliver: Callable[[Outcome[Any]], object], *_: object
    ) -> None:
        self._threads.append(_Thread(function, deliver, self.thread_passes))

    def _run_threads(self) -> None:
        """Run the functions whose time has come, each to its end; trio takes their results in after the next pass."""
        self._threads = [thread for thread in self._threads if thread.passes_left >= 0]
        for thread in self._threads:
            thread.passes_left -= 1
            if thread.passes_left < 0:
                thread.deliver(capture(thread.function))

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
        return len(self._order.names)

    @property
    def trace(self) -> int:
        """A checksum over the names of all tasks that ran, in order."""
        return zlib.crc32(";".join(self._order.names).encode())

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any, name: str) -> None:
        """Start a task; its crash is collected, and does not disturb the others."""
        self.nursery.start_soon(self._guard, function, args, name=name)

    async def _guard(self, function: Callable[..., Awaitable[Any]], args: Sequence[Any]) -> None:
        try:
            await function(*args)
        except Exception as exc:
            self.crashes.append(exc)

    def tick(self, passes: int = 1, order: int = FIFO) -> None:
        """Run scheduler passes.

        The digits of `order` choose the permutation of the runnable tasks in each pass: the first digit, modulo the
        number of tasks, is the index of the task that goes first, the next digit the index of the second task among
        the rest. Where no digits are left, the tasks go in the order of their start, or by the seed of `reorder`.
        """
        self._order.digits = order
        for _ in range(passes):
            self._pass()
            self.passes += 1
        self._order.digits = FIFO

    def reorder(self, seed: int) -> None:
        """From the next pass on, runnable tasks go in random orders from this seed, or in order of their start if 0."""
        self._order.random = random.Random(seed) if seed else None

    def settle(self, limit: int = 2000) -> None:
        """Passes until every task is blocked. Livelock after `limit`."""
        for _ in range(limit):
            before = len(self._order.names)
            self._pass()
            self.passes += 1
            if len(self._order.names) == before and not self._threads:
                return
        found = ", ".join(self._places(self._order.latest))
        places = textwrap.shorten(f", in {found}", MAX_LINES * WIDTH, placeholder=" ...") if found else ""
        raise Livelock(f"tasks were still running after {limit} passes{places}:\n{self.stacks()}")

    def seconds_to_next_deadline(self) -> float:
        """On the simulated clock; infinite without a deadline."""
        return trio.lowlevel.current_statistics().seconds_to_next_deadline

    def seconds_of_rest(self) -> float:
        """Until a task can run, if nothing but time passes: 0 if one can run now, infinite without a deadline."""
        statistics = trio.lowlevel.current_statistics()
        return 0.0 if statistics.tasks_runnable else max(0.0, statistics.seconds_to_next_deadline)

    def stacks(self, names: Iterable[str] | None = None) -> str:
        """Where the tasks with these names wait, in this order, or all tasks, and then those below them."""
        return "\n".join(f"{task.name}:\n{_stack(task)}" for task in _with_those_below(self._named(names)))

    def places(self, names: Iterable[str] | None = None) -> str:
        """The functions in which these tasks wait, each once, inner nurseries first; some of them if there are many.

        Of each task it is the innermost function in a file that is the user's, or else the innermost one.
        """
        above = self._named(names)
        places = self._places([*_with_those_below(above)[len(above) :], *above])
        text = f"tasks wait in {', '.join(places)}" if places else ""
        return textwrap.fill(text, WIDTH, subsequent_indent="  ", max_lines=MAX_LINES, placeholder=" ...")

    def _places(self, tasks: Iterable[trio.lowlevel.Task]) -> list[str]:
        return list(dict.fromkeys(filter(None, (_place(task, self._is_users) for task in tasks))))

    def _named(self, names: Iterable[str] | None) -> list[trio.lowlevel.Task]:
        tasks = {task.name: task for task in _sorted(self.nursery.child_tasks)}
        return [tasks[name] for name in (tasks if names is None else names) if name in tasks]

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
            vars(_threads).update(self._threading)

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


@dataclass
class _Thread:
    """A function that a task awaits in a thread."""

    function: Callable[[], Any]
    deliver: Callable[[Outcome[Any]], object]
    passes_left: int


def _refuse_call_from_thread(*_: object) -> NoReturn:
    raise RuntimeError("trio.from_thread cannot call into trio here: threads are simulated, in the thread of the loop")


class _Order:
    """Stands for trio's random numbers; trio takes tasks from the end of the batch that it has shuffled."""

    def __init__(self) -> None:
        self.digits = FIFO  # of the order, as a permutation's Lehmer code
        self.random: random.Random | None = None  # where no digits are left; None for the order of their start
        self.names: list[str] = []  # of the tasks that took a step
        self.latest: list[trio.lowlevel.Task] = []  # the last of them, in the order of their start

    def shuffle(self, batch: list[trio.lowlevel.Task]) -> None:
        """Order the batch, which is in the order of the tasks' start."""
        if not batch:
            return
        self.latest = list(batch)
        if len(batch) > 1:
            if self.digits:
                self._permute(batch)
            elif self.random is not None:
                self.random.shuffle(batch)
        self.names += [task.name for task in batch]
        batch.reverse()

    def _permute(self, batch: list[trio.lowlevel.Task]) -> None:
        for place in range(len(batch) - 1):
            self.digits, index = divmod(self.digits, len(batch) - place)
            batch.insert(place, batch.pop(place + index))


def _sorted(tasks: Iterable[trio.lowlevel.Task]) -> list[trio.lowlevel.Task]:
    return sorted(tasks, key=lambda task: task.name)


def _with_those_below(tasks: list[trio.lowlevel.Task]) -> list[trio.lowlevel.Task]:
    below = (_with_those_below(_sorted(inner.child_tasks)) for task in tasks for inner in task.child_nurseries)
    return [*tasks, *itertools.chain.from_iterable(below)]


def _stack(task: trio.lowlevel.Task) -> str:
    frames = traceback.StackSummary.extract(await_frames(task.coro))
    ours = [frame for frame in frames if not frame.filename.startswith(_TRIO)]
    theirs = [frame for frame in ours if not frame.filename.startswith(_KIT)]
    return "".join(traceback.format_list(theirs or ours))


def _place(task: trio.lowlevel.Task, is_users: Callable[[str], bool]) -> str:
    """The innermost function of the user's, or else the innermost one outside trio, this kit and `trioengine.aio`."""
    frames = [
        (frame.f_code, line)
        for frame, line in await_frames(task.coro)
        if not frame.f_code.co_filename.startswith((_TRIO, _KIT))
    ]
    if not frames:
        return ""
    users = [each for each in frames if is_users(each[0].co_filename)]
    callers = [each for each in frames if not each[0].co_filename.startswith(_AIO)]
    code, line = (users or callers or frames)[-1]
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line} {code.co_qualname}"


def await_frames(awaited: Any) -> Iterator[tuple[FrameType, int]]:
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
