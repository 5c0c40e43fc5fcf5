"""Base class of machines for programs on asyncio, which need the package simloop."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.testing.asyncio_loop import AsyncioLoop, Task, stacks, understood
from trioengine.testing.fuzz.environment import ORDERS, SEEDS
from trioengine.testing.fuzz.lifecycle_machine import MAX_TASKS
from trioengine.testing.fuzz.machine import Machine
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import JUMPS, pick, recorded

Function: TypeAlias = Callable[..., Coroutine[Any, Any, object]]
SERVER = "server"  # the name of its host
WAYS = ("close", "reset", "stall", "vanish", "read again", "garbage")


@dataclass
class _Client:
    """A task of the program's, on a host of its own."""

    host: str
    owns_connection: bool  # and is cancelled with it
    is_cancelled: bool = False  # by a rule
    is_excused: bool = False
    is_stalled: bool = False
    has_vanished: bool = False


_current: ContextVar[_Client] = ContextVar("client")


class AsyncioMachine(Machine):
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
        self.clients: dict[Task, _Client] = {}
        self._first_tasks: set[Task] = set()  # those before the first client
        self._traced = 0  # events of the loop
        self._serving: Task | None = None
        if self._overrides("serve"):
            self._serving = self.loop.start_soon(SERVER, self.serve(), "serve")

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
        self._start(function.__name__, functools.partial(function, *args), owns_connection=False)

    def connect(self, function: Function, *args: Any) -> None:
        """Start `function(reader, writer, *args)` with a connection; if rules break that, the task is cancelled."""
        self._start(function.__name__, functools.partial(self._speak, function, *args), owns_connection=True)

    def is_excused(self) -> bool:
        """Return whether a rule has broken a connection of the current task."""
        return _current.get().is_excused

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
        self._cancel(pick(self._running, which))

    @precondition(lambda self: self._connected)
    @recorded(which=WHICH, how=st.sampled_from(WAYS))
    def go(self, which: int, how: str) -> None:
        """The connections of a task break, in one of the ways to break, or are read no more, until they are again."""
        task = pick(self._connected, which)
        if how in ("stall", "read again"):
            self._stall(self.clients[task], is_stalled=how == "stall")
        elif not self.clients[task].has_vanished:
            self._break(task, how)
        self.coverage.saw(how)

    @recorded(passes=st.integers(1, 8), order=st.integers(0, ORDERS - 1))
    def tick(self, passes: int, order: int) -> None:
        """Run so many callbacks, in this order."""
        self.loop.tick(passes, order)

    @recorded(seed=st.integers(0, SEEDS - 1))
    def reorder(self, seed: int) -> None:
        """From now on, to the end, callbacks run in random orders; in that of their arrival if it is 0."""
        self.loop.order.random = random.Random(seed) if seed else None

    @recorded()
    def settle(self) -> None:
        """Until no task can run."""
        self.loop.settle()
        self.check()

    @recorded(seconds=st.sampled_from(JUMPS))
    def advance(self, seconds: float) -> None:
        """The clock jumps."""
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
        """Raise the first complaint of a task, after every rule."""
        if self.trace is not None:
            events, self._traced = self.loop.trace[self._traced :], len(self.loop.trace)
            for event in events:
                if event.kind == "net" or (event.kind == "run" and event.host):
                    self.trace.add(f"  {event.host or 'network'}: {event.label}, at {event.when:.2f} s")
        for task, client in self.clients.items():
            _check_end(task, client)
        serving = self._serving
        if serving is not None and serving.done() and not serving.cancelled() and (error := serving.exception()):
            raise understood(error)
        if self.loop.logged:
            raise understood(self.loop.logged[0])

    # ---- the end --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._look()
        self._let_go()
        self._run_out(lambda: not self._running, "tasks of the program wait forever")
        for client in self.clients.values():
            for stream in self.loop.streams(client.host):
                stream.abort()
        self._run_out(lambda: not self.loop.streams(SERVER), "connections whose clients have gone are never closed")
        if self.clients and not self.keeps_tasks:
            self._run_out(
                lambda: self._first_tasks.issuperset(self.loop.unfinished), "all clients have gone, and tasks are left"
            )
        self.check()
        if (serving := self._serving) is not None:
            serving.cancel()
            self._run_out(serving.done, "serve() was cancelled, and does not end")
        self._look()
        if (error := self.loop.unread_error()) is not None:
            raise understood(error)

    def _let_go(self) -> None:
        self.let_go()
        for client in self.clients.values():
            self._stall(client, is_stalled=False)
            if client.has_vanished:  # as TCP's keep-alive does
                for stream in self.loop.streams(client.host):
                    stream.abort()
        self.loop.network.heal()

    def _run_out(self, done: Callable[[], bool], complaint: str) -> None:
        """Settle, and let the clock jump from deadline to deadline, until it is done or the horizon is reached."""
        self.loop.settle()
        end = self.seconds + self.horizon
        while not done():
            self._look()
            is_late = self.seconds + self.loop.seconds_to_next_step() > end
            assert not is_late, f"{complaint}:\n{stacks(self.loop.unfinished)}"
            self.loop.jump()
            self.loop.settle()

    def _close(self) -> None:
        try:
            for task in self.loop.unfinished:
                task.cancel()
            self._run_out(lambda: not self.loop.unfinished, "tasks do not end when cancelled")
        finally:
            self.loop.close()

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(AsyncioMachine, name)

    @property
    def _running(self) -> list[Task]:
        return [task for task in self.clients if not task.done()]

    @property
    def _connected(self) -> list[Task]:
        return [task for task, client in self.clients.items() if self._open_streams(client)]

    def _open_streams(self, client: _Client) -> list[Any]:
        return [stream for stream in self.loop.streams(client.host) if not stream.is_closing()]

    def _start(self, name: str, function: Function, *, owns_connection: bool) -> None:
        if not self.clients:
            self.loop.settle()
            self._first_tasks = set(self.loop.unfinished)
        client = _Client(f"client {len(self.clients) + 1}", owns_connection)
        token = _current.set(client)
        try:
            task = self.loop.start_soon(client.host, function(), f"{name}, {client.host}")
        finally:
            _current.reset(token)
        self.clients[task] = client

    async def _speak(self, function: Function, *args: Any) -> None:
        reader, writer = await asyncio.open_connection(SERVER, self.port)
        try:
            await function(reader, writer, *args)
        finally:
            writer.close()

    def _cancel(self, task: Task) -> None:
        self.clients[task].is_cancelled = True
        task.cancel()

    def _stall(self, client: _Client, *, is_stalled: bool) -> None:
        if client.is_stalled is not is_stalled:
            client.is_stalled = is_stalled
            for stream in self.loop.streams(client.host):
                stream.pause_reading() if is_stalled else stream.resume_reading()

    def _break(self, task: Task, how: str) -> None:
        client = self.clients[task]
        client.is_excused = True
        if how == "vanish":
            client.has_vanished = True
            self.loop.network.partition({client.host}, {SERVER})
        for stream in self._open_streams(client):
            match how:
                case "close":
                    stream.close()
                case "reset":
                    stream.abort()
                case "garbage":
                    with suppress(RuntimeError):  # where its side is closed
                        stream.write(b"\xff" * 8 + b"\n")
                    stream.close()
        if client.owns_connection:
            self._cancel(task)


def _check_end(task: Task, client: _Client) -> None:
    """The end of a task has its reason."""
    if task.cancelled():
        assert client.is_cancelled, f"{task.get_name()} was cancelled, and not by a rule"
    elif task.done() and (error := task.exception()) is not None:
        if not (client.is_excused and isinstance(error, OSError)):
            raise understood(error)
