"""Base class of machines for programs on asyncio, which need the package simloop."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.testing.asyncio_loop import WRITES, AsyncioLoop, Task, drop_if_over
from trioengine.testing.fuzz.derived import DerivedMachine
from trioengine.testing.fuzz.environment import ORDERS, SEEDS
from trioengine.testing.fuzz.inside import replaced
from trioengine.testing.fuzz.lifecycle_machine import MAX_TASKS
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import JUMPS, pick, recorded

Function: TypeAlias = Callable[..., Coroutine[Any, Any, object]]
SERVER = "server"  # the name of its host
WAYS = ("close", "reset", "stall", "vanish", "garbage")


@dataclass
class _Client:
    """A task of the program, at a host of its own."""

    host: str
    task: Task
    is_cancelled: bool = False  # by a rule
    is_excused: bool = False
    is_stalled: bool = False
    has_vanished: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.task.cancel()

    def check_end(self) -> None:
        """Assert that the end of the task has its reason; raise the task's own error."""
        if self.task.cancelled():
            assert self.is_cancelled, f"{self.task.get_name()} was cancelled, and not by a rule"
        elif self.task.done() and not (self.is_excused and isinstance(self.task.exception(), OSError)):
            self.task.result()


class AsyncioMachine(DerivedMachine):
    """A program on asyncio, under rules that cancel tasks, break connections and let time pass.

    Override `app`, or `serve` and `client`, or add rules that call `run` and `connect`. `serve` is to listen on `port`;
    tasks of the program reach it at the host "server". In the end there are no faults any more, and every task must end
    within `horizon` seconds of simulated time.

    A finding is an exception of a task, or one that asyncio would log (but for a ConnectionError); a task that waits
    forever; a connection or a task of the server that is left when its clients have gone.
    """

    port = 8080
    horizon = 60.0
    keeps_tasks = False  # whether tasks of the server may outlive the clients that they were started for

    def __init__(self) -> None:
        super().__init__()
        self.loop = AsyncioLoop()
        self._taps.callback(self.loop.close)
        self._taps.enter_context(replaced(*WRITES, drop_if_over))
        self.clients: dict[str, _Client] = {}  # by host
        self._first_tasks: set[Task] = set()  # those before the first client
        self._num_traced = 0
        self._serving = self.loop.start_soon(SERVER, self.serve(), "serve") if self._overrides("serve") else None
        self._check_names()

    # ---- to override ----------------------------------------------------------------------------------------------

    async def app(self) -> object:
        """Use the program, and end. A rule starts this again and again, beside those that run."""
        raise NotImplementedError

    async def serve(self) -> object:
        """Listen on `port`, and serve clients until the task is cancelled. This is started once."""
        raise NotImplementedError

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> object:
        """Use the server over one connection, assert the answers, and end. A rule starts this again and again."""
        raise NotImplementedError

    def check(self) -> None:
        """Assert the invariants that hold whenever no task can run."""

    def let_go(self) -> None:
        """The end begins: wake every task of the program that waits for a rule."""

    # ---- for rules and tasks --------------------------------------------------------------------------------------

    def run(self, function: Function, *args: Any) -> None:
        """Start a task, which must end by itself; rules may cancel it, and break the connections that it opens."""
        if not self.clients:
            self.loop.settle()
            self._first_tasks = set(self.loop.unfinished)
        host = f"client {len(self.clients) + 1}"
        task = self.loop.start_soon(host, function(*args), f"{function.__name__}, {host}")
        self.clients[host] = _Client(host, task)

    def connect(self, function: Function, *args: Any) -> None:
        """Start `function(reader, writer, *args)` with a connection to the server."""

        @functools.wraps(function)
        async def speak() -> None:
            reader, writer = await asyncio.open_connection(SERVER, self.port)
            try:
                await function(reader, writer, *args)
            finally:
                writer.close()

        self.run(speak)

    def is_excused(self) -> bool:
        """Return whether a rule has disturbed the connections of the current task, or let time pass."""
        return self.clients[self.loop.host].is_excused

    @property
    def may_start(self) -> bool:
        """Whether few tasks of the program run."""
        return len(self._running) < MAX_TASKS

    # ---- rules ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._overrides("app") and self.may_start)
    @recorded()
    def start(self) -> None:
        """The app runs once more."""
        self.run(self.app)

    @precondition(lambda self: self._overrides("client") and self.may_start)
    @recorded()
    def join(self) -> None:
        """A client connects."""
        self.connect(self.client)

    @precondition(lambda self: self._running)
    @recorded(which=WHICH)
    def cancel(self, which: int) -> None:
        """A task of the program is cancelled."""
        pick(self._running, which).cancel()

    @precondition(lambda self: self._connected)
    @recorded(which=WHICH, how=st.sampled_from(WAYS))
    def go(self, which: int, how: str) -> None:
        """The connections of a task break, and it is cancelled; or they are read no more, until the next stall."""
        client = pick(self._connected, which)
        client.is_excused = True
        self.coverage.saw(how)
        if how == "stall":
            self._stall(client, is_stalled=not client.is_stalled)
            return
        if how == "vanish":
            client.has_vanished = True
            self.loop.network.partition({client.host}, {SERVER})
        for stream in self.loop.streams(client.host):
            if how == "garbage":
                with suppress(RuntimeError):  # where its side is closed
                    stream.write(b"\xff" * 8 + b"\n")
            if how != "vanish":
                stream.abort() if how == "reset" else stream.close()
        client.cancel()

    @recorded(passes=st.integers(1, 8), order=st.integers(0, ORDERS - 1))
    def tick(self, passes: int, order: int) -> None:
        """Run so many callbacks, in this order."""
        self.loop.tick(passes, order)

    @recorded(seed=st.integers(0, SEEDS - 1))
    def reorder(self, seed: int) -> None:
        """From now on, to the end, callbacks run in random orders, or in the order of their arrival if it is 0."""
        self.loop.order.random = random.Random(seed) if seed else None

    @recorded()
    def settle(self) -> None:
        """Until no task can run."""
        self.loop.settle()
        self.check()

    @recorded(seconds=st.sampled_from(JUMPS))
    def advance(self, seconds: float) -> None:
        """The clock jumps, which may exceed the timeout of a client."""
        for client in self._running:
            client.is_excused = True
        self.loop.jump(seconds)
        self.loop.tick()

    # ---- overrides --------------------------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        return self.loop.order.steps

    @property
    def seconds(self) -> float:
        return self.loop.seconds

    @property
    def checksum(self) -> str:
        return self.loop.checksum

    def act(self, rule: Callable[[], None]) -> None:
        super().act(rule)
        self._try(self._look)
        self._report()

    def _look(self) -> None:
        """Raise the first complaint of a task."""
        if self.trace is not None:
            events, self._num_traced = self.loop.trace[self._num_traced :], len(self.loop.trace)
            for event in events:
                if event.kind == "net" or (event.kind == "run" and event.host):
                    self.trace.add(f"  {event.host or 'network'}: {event.label}, at {event.when:.2f} s")
        for client in self.clients.values():
            client.check_end()
        if self._serving is not None and self._serving.done() and not self._serving.cancelled():
            self._serving.result()
        if self.loop.logged:
            raise self.loop.logged[0]

    # ---- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._look()
        self.let_go()
        for client in self.clients.values():
            self._stall(client, is_stalled=False)
            if client.has_vanished:  # as TCP's keep-alive does
                self._abort_streams(client)
        self.loop.network.heal()
        self._run_out(lambda: not self._running, "tasks of the program wait forever")
        for client in self.clients.values():
            self._abort_streams(client)
        self._run_out(lambda: not self.loop.streams(SERVER), "connections whose clients have gone are never closed")
        if self.clients and not self.keeps_tasks:
            self._run_out(
                lambda: self._first_tasks.issuperset(self.loop.unfinished), "all clients have gone, and tasks are left"
            )
        self.check()
        if self._serving is not None:
            self._serving.cancel()
            self._run_out(self._serving.done, "serve() was cancelled, and does not end")
        self._look()
        if (error := self.loop.unread_error()) is not None:
            raise error

    def _run_out(self, done: Callable[[], bool], complaint: str) -> None:
        """Settle, and let the clock jump from deadline to deadline, until it is done or the horizon is reached."""
        self.loop.settle()
        end = self.seconds + self.horizon
        while not done():
            self._look()
            is_late = self.seconds + self.loop.seconds_to_next_step() > end
            assert not is_late, f"{complaint}:\n{self.loop.stacks()}"
            self.loop.jump()
            self.loop.settle()

    def _close(self) -> None:
        for task in self.loop.unfinished:
            task.cancel()
        self._run_out(lambda: not self.loop.unfinished, "tasks do not end when cancelled")

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(AsyncioMachine, name)

    @property
    def _running(self) -> list[_Client]:
        return [client for client in self.clients.values() if not client.task.done()]

    @property
    def _connected(self) -> list[_Client]:
        """Those whose connections can break, or can be read no more."""
        return [each for each in self._running if not each.has_vanished and self.loop.streams(each.host)]

    def _stall(self, client: _Client, *, is_stalled: bool) -> None:
        client.is_stalled = is_stalled
        for stream in self.loop.streams(client.host):
            stream.pause_reading() if is_stalled else stream.resume_reading()

    def _abort_streams(self, client: _Client) -> None:
        for stream in self.loop.streams(client.host):
            stream.abort()
