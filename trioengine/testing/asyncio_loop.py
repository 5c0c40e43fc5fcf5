"""asyncio, a callback at a time, under the hand of a synchronous caller: the loop of the package simloop.

The order in which callbacks run is given as data, and time passes by `jump` alone. Of simloop, and of asyncio's
tasks, private names are used; tests/testing/test_asyncio_machine.py fails if they change.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from trioengine.testing.sim_loop import FIFO, Livelock, await_frames

try:
    import simloop
    from simloop import _net, _transports
except ModuleNotFoundError as exc:
    needed = "machines for asyncio need the package simloop and Python 3.12: pip install simloop"
    raise ModuleNotFoundError(needed, name=exc.name) from exc

Task = asyncio.Task[Any]
WRITES = (_transports._SimStreamTransport, "write")  # raises if the connection is over; asyncio's drops the data
BUFFERED, RESUMED = 1024, 256  # bytes that are not read: a writer waits, and goes on
MOST_STEPS = 20_000  # without a moment of time between them; more is a livelock


class AsyncioLoop:
    """One run of asyncio. `network` is simloop's; a task that is started at a host connects from there."""

    def __init__(self) -> None:
        self._loop = loop = simloop.SimLoop()
        self.network = loop.net
        self.network.set_flow_control(high=BUFFERED, low=RESUMED)
        self.order = loop._policy = _Order(loop.stop)
        self.tasks: list[Task] = []  # all that were started
        self.logged: list[Exception] = []  # errors that asyncio would log, other than a connection's
        self._connect, loop.create_connection = loop.create_connection, self._connect_or_reset
        loop.set_task_factory(self._make_task)
        loop.set_exception_handler(self._log)

    def _make_task(self, loop: Any, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Task:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.tasks.append(task)
        task.set_name(options.get("name") or f"task-{len(self.tasks)}")  # asyncio counts all tasks of the process
        return task

    def _log(self, loop: Any, context: dict[str, Any]) -> None:
        if isinstance(error := context.get("exception"), Exception) and not isinstance(error, ConnectionError):
            self.logged.append(error)

    async def _connect_or_reset(self, *args: Any, **options: Any) -> Any:
        """Connect, and reset the connection if the caller has been cancelled: simloop would leave the server's end."""
        creating = asyncio.ensure_future(self._connect(*args, **options))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(lambda made: made.cancelled() or made.exception() or made.result()[0].abort())
            raise

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The time on the simulated clock."""
        return float(self._loop._now)

    @property
    def host(self) -> str:
        """The host of the current task, and of all that it has started."""
        return str(_net._current_host.get())

    @property
    def trace(self) -> Sequence[Any]:
        """The events of simloop's trace."""
        events: Sequence[Any] = self._loop.trace
        return events

    @property
    def checksum(self) -> str:
        """Equal in two runs that took the same steps."""
        return f"{self.order.steps}:{self._loop.trace_hash()[:8]}"

    @property
    def unfinished(self) -> list[Task]:
        """The tasks that have not ended."""
        return [task for task in self.tasks if not task.done()]

    def stacks(self) -> str:
        """Where the tasks wait that have not ended, the latest first."""
        return "\n".join(f"{task.get_name()}:\n{_stack(task)}" for task in reversed(self.unfinished))

    def streams(self, host: str) -> list[Any]:
        """Return the transports at a host, of connections that are not over."""
        return [stream for stream in self.network._streams.values() if stream.get_extra_info("sockname")[0] == host]

    def unread_error(self) -> BaseException | None:
        """Return the first error that asyncio would log when it forgets the task that has failed."""
        failed = (task for task in self.tasks if task.done() and task._log_traceback)
        return next((task.exception() for task in failed), None)

    # ---- running it -------------------------------------------------------------------------------------------------

    def start_soon(self, host: str, coroutine: Coroutine[Any, Any, object], name: str) -> Task:
        """Start a task at a host."""
        task: Task = self.network.host(host).create_task(coroutine, name=name)
        return task

    def tick(self, passes: int = 1, order: int = FIFO) -> bool:
        """Run so many callbacks, chosen by the digits of `order`; whether one could run.

        The first digit, modulo the number of callbacks that can run now, is the index of the first one, and so on.
        """
        self.order.digits, before = order, self.order.steps
        for _ in range(passes):
            if self.seconds_to_next_step() == 0.0:
                self._loop.run_forever()  # that is, until the order stops it
        self.order.digits = FIFO
        return self.order.steps > before

    def settle(self) -> None:
        """Run callbacks until none can run now. Livelock after MOST_STEPS."""
        for _ in range(MOST_STEPS):
            if not self.tick():
                return
        raise Livelock(f"tasks were still running after {MOST_STEPS} steps:\n{self.stacks()}")

    def seconds_to_next_step(self) -> float:
        """Return 0 if a callback can run now, and infinity if none ever will."""
        timers = self._loop._timers
        while timers and timers[0][3].cancelled():
            heapq.heappop(timers)
        if self._loop._ready:
            return 0.0
        return max(0.0, timers[0][0] - self.seconds) if timers else math.inf

    def jump(self, seconds: float | None = None) -> None:
        """Time passes: so much, or until the next callback can run."""
        to = self._loop._timers[0][0] if seconds is None else self.seconds + seconds
        self._loop._now = max(self.seconds, to)

    def close(self) -> None:
        """End, however many tasks are left."""
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if task.done():
                task._log_traceback = False
        self._loop.close()


class _Order:
    """Stands for simloop's policy: chooses the callback that runs next, and ends simloop's run after it."""

    diverged_at = None

    def __init__(self, stop: Callable[[], None]) -> None:
        self.digits = FIFO
        self.random: random.Random | None = None  # where no digits are left; None for the order of their arrival
        self.steps = 0
        self._stop = stop

    def choose(self, ready: Sequence[object]) -> int:
        """Return the index of the next one."""
        self._stop()
        self.steps += 1
        if self.digits:
            self.digits, index = divmod(self.digits, len(ready))
            return index
        return 0 if self.random is None else self.random.randrange(len(ready))


def drop_if_over(write: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """Return a method for WRITES that does as asyncio's."""
    return lambda stream, data: None if stream.is_closing() else write(stream, data)


def _stack(task: Task) -> str:
    frames = traceback.StackSummary.extract(await_frames(task.get_coro()))
    return "".join(traceback.format_list(frames))
