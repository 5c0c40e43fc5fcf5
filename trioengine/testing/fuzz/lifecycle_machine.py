"""Base class of the machines for programs that use trioengine: an engine, its environment, and the program's tasks."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import trio
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.actors.engine import Engine
from trioengine.actors.observer import Observer
from trioengine.actors.session import Session
from trioengine.core.errors import EngineAsleep, EngineClosed, EngineOverloaded, SessionEnded, TimedOut, WorkerLost
from trioengine.core.types import Cause
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.callers import Call
from trioengine.testing.fuzz.derived import DerivedMachine
from trioengine.testing.fuzz.environment import Switch
from trioengine.testing.fuzz.faults import Harm, Life
from trioengine.testing.fuzz.oracles import check_stopped, check_worker
from trioengine.testing.fuzz.peers import WHICH, PeersEnvironment
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.trace import current_place
from trioengine.testing.fuzz.world import CONFIG, LIMITS
from trioengine.testing.memory_peer import MemoryPeer
from trioengine.testing.simulated_peer import PeerState

MAX_TASKS = 4  # of the program, at once
EXCUSABLE = (EngineAsleep, EngineClosed, EngineOverloaded, SessionEnded, TimedOut, WorkerLost)


class LifecycleMachine(DerivedMachine, PeersEnvironment[MemoryPeer]):
    """A program that uses an engine, under the rules of the environment.

    Override `app`, or `serve` and `client`, or add rules that call `run` and `connect`. The rules of the environment
    start these tasks and cancel them at any pass, break connections at any byte, kill, stop and restart the worker, put
    the engine to sleep, end it, and let time pass. In the end there are no faults any more, and every task must end.

    A finding is an exception of a task: an AssertionError or any other one, but for the EXCUSABLE errors of the engine;
    EngineClosed and WorkerLost only pass if the engine was closed, or a worker harmed, while the task lived. Other
    findings are a task, a connection or a session that is left in the end, and a difference between the engine and the
    worker.

    `config` is the engine's, and `limits` the worker's; in the end tasks may take `horizon` seconds on the simulated
    clock.
    """

    config = replace(CONFIG, max_sessions=8, max_num_queued_reqs=4)
    limits = replace(LIMITS, max_model_len=512, kv_blocks_total=80)
    keeps_sessions = False  # whether `serve` holds sessions while there are no clients

    def __init__(self) -> None:
        super().__init__()
        self._tasks: list[Call] = []
        self._lives: dict[trio.lowlevel.Task, Life] = {}
        self._openers = _Openers()
        self.engine.observers.append(self._openers)
        self._serving: Call | None = None
        if self._overrides("serve"):
            self._call("serve", self._serve, EXCUSABLE)
            self._serving = self.calls[-1]
        self._check_names()

    # ---- to override ----------------------------------------------------------------------------------------------

    async def app(self, engine: Engine) -> object:
        """Use the engine, and end. A rule starts this again and again, beside those that run."""
        raise NotImplementedError

    async def serve(self, engine: Engine, listener: trio.abc.Listener[trio.abc.Stream]) -> object:
        """Serve clients until the task is cancelled, or the engine has ended. This is started once."""
        raise NotImplementedError

    async def client(self, stream: trio.abc.HalfCloseableStream) -> object:
        """Use the server over one connection, assert the answers, and end. A rule starts this again and again."""
        raise NotImplementedError

    def check(self) -> None:
        """Assert the invariants that hold whenever no task can run and no byte is on its way."""

    def let_go(self) -> None:
        """The end begins: wake every task of the program that waits for a rule."""

    # ---- for rules and tasks --------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start a task, which must end by itself; rules may cancel it before."""
        self._start(function.__name__, functools.partial(function, *args))

    def connect(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Start `function(stream, *args)` as a client with a connection of its own; rules may break that."""
        peer = MemoryPeer()
        self._join(peer)
        self._start(function.__name__, functools.partial(self._speak, peer, function, args))

    def is_excused(self) -> bool:
        """Return whether a fault was injected while the current task lived, so that its call may have failed."""
        return self.faults.hit(self._lives[trio.lowlevel.current_task()], *Harm)

    # ---- rules ----------------------------------------------------------------------------------------------------

    @recorded(initialize, ready=st.sampled_from((True, True, True, False)))
    def begin(self, ready: bool) -> None:
        """Mostly on an engine that is ready."""
        if ready:
            self._settle()

    @precondition(lambda self: self._overrides("app") and self.may_start)
    @recorded()
    def start(self) -> None:
        """The app runs once more."""
        self.run(self.app, self.engine)

    @precondition(lambda self: self._overrides("client") and self.may_start)
    @recorded()
    def join(self) -> None:
        """A client connects."""
        self.connect(self.client)

    @precondition(lambda self: self._running)
    @recorded(which=WHICH)
    def cancel(self, which: int) -> None:
        """A task of the program is cancelled."""
        pick(self._running, which).scope.cancel()

    @precondition(lambda self: self.in_use)
    @recorded(how=st.sampled_from(("keep", "wake", "wake", "wake", "abort", "wait", "weights")))
    def switch(self, how: Switch) -> None:
        """An operator puts the engine to sleep, or wakes it."""
        self._switch(how)

    @precondition(lambda self: bool(inside.names(self.engine)))
    @recorded(which=WHICH)
    def abort(self, which: int) -> None:
        """An operator aborts a request by its id, or all requests of a label."""
        name = pick(inside.names(self.engine), which)
        going = inside.called(self.engine, name)
        self.faults.strike(Harm.OPERATORS)
        self.requests.fix_cause(going, Cause.CLIENT)
        ended = self.engine.abort(name)
        assert ended == len(going), f"abort({name!r}) returned {ended}, and {len(going)} were going"
        check_stopped(self.engine, set(going))

    # ---- helpers --------------------------------------------------------------------------------------------------

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(LifecycleMachine, name)

    @property
    def _running(self) -> list[Call]:
        return [call for call in self._tasks if not call.over]

    @property
    def may_start(self) -> bool:
        """Whether few tasks of the program run."""
        return len(self._running) < MAX_TASKS

    def _start(self, name: str, function: Callable[[], Awaitable[object]]) -> None:
        self._call(name, functools.partial(self._live, function), EXCUSABLE)
        self._tasks.append(self.calls[-1])

    async def _live(self, function: Callable[[], Awaitable[object]]) -> None:
        task = trio.lowlevel.current_task()
        self._lives[task] = Life(self.faults)
        if self.trace is not None:
            self.trace.add(f"  task {task.name} starts")
        end = "ends"
        try:
            await function()
        except BaseException as exc:
            end = f"ends with {type(exc).__name__}"
            raise
        finally:
            del self._lives[task]
            if self.trace is not None:
                self.trace.add(f"  task {task.name} {end}")

    async def _speak(self, peer: MemoryPeer, client: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
        """Run a client; its connection may break if the rules have broken it, or the server may have ended."""
        try:
            with peer.scope:
                await client(peer.client_stream, *args)
        except trio.BrokenResourceError:
            assert peer.peer_state is not PeerState.WELL or self.is_excused(), "the server has closed the connection"
        finally:
            if peer.peer_state is not PeerState.VANISHED:
                peer.close()

    async def _serve(self) -> None:
        try:
            await self.serve(self.engine, self.listener)
        finally:
            with trio.CancelScope(shield=True):
                await self.listener.aclose()

    # ---- overrides --------------------------------------------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        return bool(self._tasks)

    def _check(self) -> None:
        super()._check()
        if self.is_well:
            check_worker(self.engine, self._worker(), inside.sessions(self.engine))
        self.check()

    def _let_go(self) -> None:
        self.let_go()
        self._wake_up()
        for client in self.clients:
            if client.peer_state is PeerState.VANISHED:
                client.reset()  # as TCP's keep-alive does
            elif client.peer_state is PeerState.STALLED:
                client.peer_state = PeerState.WELL
        callers = sorted(self.running_calls, key=lambda call: call is self._serving)
        names = [call.task.name for call in callers if call.task is not None]
        self._run_out(lambda: not self._running, "tasks of the program wait forever", names)
        for client in self.clients:
            client.close()
        self._run_out(lambda: not self.present, "connections whose clients have gone are never closed", names)
        if not self.keeps_sessions:
            self._run_out(lambda: not self._sessions, self._describe_sessions, names)
        if (serving := self._serving) is not None:
            serving.scope.cancel()
            self._run_out(lambda: serving.over, "serve() was cancelled, and does not end", names)
        assert not self._sessions, self._describe_sessions()

    def _describe_sessions(self) -> str:
        places = (self._openers.places.get(session, "an unknown place") for session in self._sessions)
        allows = "" if self.keeps_sessions else " (keeps_sessions = True allows it)"
        is_over = self._serving is not None and self._serving.over
        ended = "serve() has ended" if is_over else f"no task of app, run or connect runs{allows}"
        return f"{ended}, and sessions are left, opened at {'; '.join(places)}"

    @property
    def _sessions(self) -> list[inside.SessionActor]:
        """Those that have not ended."""
        return [session for session in inside.sessions(self.engine) if session.end_cause is None]


class _Openers(Observer):
    """Notes where the program opened its sessions."""

    def __init__(self) -> None:
        self.places: dict[inside.SessionActor, str] = {}

    def session_opened(self, session: object) -> None:
        assert isinstance(session, Session), "it has been entered"
        self.places[inside.actor(session)] = current_place()
