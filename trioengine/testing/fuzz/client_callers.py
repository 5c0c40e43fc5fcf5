"""Programs that use a server by `connect`, as tasks: as those that use an engine, each with connections of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import trio

from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.client.client import Client, connect
from trioengine.client.connection import PING_INTERVAL
from trioengine.client.prompt import Media
from trioengine.client.session import Session as RemoteSession
from trioengine.core.errors import (
    ConnectionLost,
    EngineAsleep,
    EngineClosed,
    EngineError,
    EngineOverloaded,
    RequestRejected,
    SessionBusy,
    SessionEnded,
    TimedOut,
    WorkerLost,
)
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Chunk, Completion
from trioengine.testing.fuzz import inside, inside_client
from trioengine.testing.fuzz.callers import Oops, Reader, SessionHolder, Style
from trioengine.testing.fuzz.conversations import LONG, Content, Turn, media_of, text_of
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.timeouts import partial_of
from trioengine.testing.memory_peer import RemotePeer
from trioengine.testing.simulated_peer import PeerState

PASSES = 6  # before a read that is cancelled
UNSEALED = "no memory for an image"  # in an error after `fail_system`
HISTORIES: tuple[tuple[Turn, ...], ...] = (
    (),
    (("user", "a"), ("assistant", "b")),
    tuple(("user" if number % 2 == 0 else "assistant", "a") for number in range(70)),  # too many to be sent at once
    LONG,
)
UNANSWERED = "does not answer as trioengine does"  # in an error of a session that is being opened


@dataclass
class Line:
    """The connections of one caller, in the order in which they were dialed."""

    user: User
    is_active: Callable[[], bool] = lambda: False
    peers: list[RemotePeer] = field(default_factory=list)
    is_undialed: bool = False  # a dial was made to fail
    silences: int = 0
    _heard_at: float = 0.0
    states: list[str] = field(default_factory=list)  # of the server's engine, as they were reported

    def dialed(self) -> RemotePeer:
        """A new connection."""
        self.peers.append(RemotePeer(self.is_active))
        return self.peers[-1]

    def harm(self) -> None:
        """From now on the latest connection may be lost."""
        for peer in self.peers[-1:]:
            peer.is_harmed = True

    @property
    def is_harmed(self) -> bool:
        """Whether a rule has done anything by which a connection may be lost."""
        return self.is_undialed or self.user.is_leaving or any(peer.is_harmed for peer in self.peers)

    @property
    def is_well(self) -> bool:
        """Whether the latest connection was not harmed."""
        return bool(self.peers) and not self.is_harmed and self.peers[-1].peer_state is PeerState.WELL

    def listen(self) -> None:
        """No task can run: count the intervals between pings in which nothing arrived."""
        since = self.peers[-1].silent_since if self.peers else math.inf
        if since == math.inf:
            self.silences, self._heard_at = 0, 0.0
        elif trio.current_time() >= max(since, self._heard_at) + PING_INTERVAL:
            self.silences, self._heard_at = self.silences + 1, trio.current_time()


LINE: ContextVar[Line] = ContextVar("line")  # of the task that opens a session


@dataclass
class User:
    """A task in a scope of `connect`, until `leave` is set."""

    life: Life
    dial: Callable[[], Any]
    client: Client | None = None
    raises: bool = False  # its body
    dislikes_states: bool = False  # its `on_state` raises
    has_failed: bool = False  # its `on_state` has raised
    over: bool = False
    left_at: float = math.inf
    leave: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def run(self) -> None:
        try:
            with self.scope:
                async with connect("ws://localhost", dial=self.dial, on_state=_take_state) as client:
                    self.client = client
                    await self.leave.wait()
                    if self.raises:
                        raise Oops
        except Oops:
            pass
        except ExceptionGroup as group:  # its body and its `on_state` have both raised
            if not (self.raises and self.has_failed and [type(each) for each in group.exceptions] == [Oops, Oops]):
                raise
        finally:
            self.over = True
            self.life.end()

    @property
    def is_leaving(self) -> bool:
        """Whether its sessions end because of it."""
        return self.leave.is_set() or self.is_cut

    @property
    def is_cut(self) -> bool:
        """Whether they end at once."""
        return self.scope.cancel_called or self.has_failed

    def go(self, how: str) -> None:
        """Leave the scope in this way."""
        match how:
            case "cancel":
                self.scope.cancel()
            case "raise":
                self.raises = True
                self.leave.set()
            case "dislike":
                self.dislikes_states = True
            case _:
                self.leave.set()


def _take_state(state: str) -> None:
    line = LINE.get()
    line.states.append(state)
    if line.user.dislikes_states:
        line.user.has_failed = True
        raise Oops


def check_error(
    error: EngineError, line: Line, life: Life, faults: InjectedFaults, *, wait: bool | None, deadline: float
) -> None:
    """In the step in which it is raised: the error has its reason in the program, and the call did not wait for it."""
    match error:
        case TimedOut():
            assert trio.current_time() >= deadline, f"it has time until {deadline}, and got {error!r}"
        case ConnectionLost():
            is_refused = UNANSWERED in str(error) and faults.hit(life, Harm.DISPLACES, Harm.CLOSING)
            is_excused = line.is_harmed or is_refused
            assert is_excused, f"the connection was not harmed, and {error!r}"
        case EngineClosed():
            is_excused = line.user.is_leaving or faults.hit(life, Harm.CLOSING, Harm.WORKERS)
            assert is_excused, f"neither server nor client was closed, and {error!r}"
        case WorkerLost():
            assert faults.hit(life, Harm.WORKERS), f"no worker was harmed, and {error!r}"
        case EngineAsleep():
            assert faults.hit(life, Harm.SLEEP), f"the engine was awake, and {error!r}"
            assert not inside.waits_for(error, wait), f"it was to wait, and got {error!r}"
        case EngineOverloaded():
            _check_overloaded(error, life, faults, wait)
        case _:
            raise AssertionError(f"nothing was wrong, and {error!r}")


def _check_overloaded(error: EngineOverloaded, life: Life, faults: InjectedFaults, wait: bool | None) -> None:
    if error.code == "buffers_full" or UNSEALED in str(error):
        return  # also of a history, or of a connection, for which no call waits
    assert wait is not True, f"it was to wait, and got {error!r}"
    if error.code == "overloaded" and not error.is_full:
        assert faults.hit(life, Harm.WORKERS, Harm.CLOSING), f"the worker was well, and {error!r}"
        return
    assert error.code in ("overloaded", "too_many_connections"), f"refused for {error.code}, which is not a reason here"
    assert wait is False, f"it was to wait for a free slot, and got {error!r}"


@dataclass(kw_only=True, repr=False)
class RemoteHolder(SessionHolder):
    """A task with a session over a connection; a client has the interface of an engine."""

    faults: InjectedFaults
    line: Line
    opened_by: float = math.inf  # the time at which it gives up
    left_at: float = math.inf
    handle: RemoteSession | None = None  # also while it is opened
    readers: list[RemoteReader] = field(default_factory=list)  # type: ignore[assignment]
    histories: list[tuple[str, tuple[Turn, ...]]] = field(default_factory=list)  # each after the response with this id

    async def run(self) -> None:
        LINE.set(self.line)
        self.line.is_active = lambda: self.is_busy
        if self.timeout is not None:
            self.opened_by = trio.current_time() + self.timeout
        try:
            with self.scope:
                await self._hold()
        except EngineError as exc:
            self.error = exc
            if not (self.ended and isinstance(exc, SessionEnded)):
                check_error(exc, self.line, self.life, self.faults, wait=self.wait, deadline=self.opened_by)
        finally:
            self.over = True
            self.life.end()
            assert self.session is None or self.error is None, f"only entering is refused, and {self.error!r}"

    async def _hold(self) -> None:
        client = self.line.user.client
        assert client is not None, "it is started where there is one"
        self.handle = client.open_session(
            wait=self.wait, timeout=self.timeout, overflow=self.overflow, history=self.messages
        )
        async with self.handle as session:
            self.session = cast("Session", session)  # has the same interface
            try:
                await self.leave.wait()
            finally:
                self.left = True
        assert inside_client.is_closed(session), f"leaving waits until it is closed, and {session} is not"

    def give_up(self) -> bool:
        """Cancel the session unless it is open. Returns whether it was being opened, over a connection."""
        if self.session is not None or self.over:
            return False
        self.scope.cancel()
        return self.handle is not None and self.handle.id is not None

    def end(self) -> None:
        """End the session, also while it is opened."""
        if self.handle is not None:
            self.ended = True
            self.handle.end()


@dataclass(repr=False)
class RemoteReader(Reader):
    """A task with one request of a session over a connection."""

    @property
    def has_outcome(self) -> bool:
        """Whether its request has one."""
        return self.generation is not None and self.generation.outcome is not None

    def is_abortable(self, client: Client) -> bool:
        """Whether an abort by this client ends its request."""
        holder, generation = self.holder, self.generation
        assert isinstance(holder, RemoteHolder), "it has a session over a connection"
        is_there = generation is not None and inside_client.has_id(generation) and holder.line.user.client is client
        return is_there and not (self.over or self.has_outcome or self.aborted)

    async def _next(self, generation: Generation) -> Chunk | None:
        for _ in range(PASSES if self.style is Style.TRIES else 0):  # text comes that a cancelled read must not lose
            await trio.lowlevel.checkpoint()
        return await super()._next(generation)

    def _judge(self, error: EngineError, session: Session) -> None:
        holder = self.holder
        assert isinstance(holder, RemoteHolder), "it has a session over a connection"
        match error:
            case SessionBusy():
                others = [reader for reader in holder.readers if reader is not self and not reader.over]
                is_busy = not all(other.has_outcome for other in others)
                assert is_busy and not self.entered, f"the session has no other request, and {error!r}"
            case SessionEnded():
                assert holder.gave_up, f"the session was not ended, and {error!r}"
            case RequestRejected():
                pass  # judged when it is over
            case _:
                check_error(error, holder.line, self.life, holder.faults, wait=self.wait, deadline=self.deadline)


def expect_aborts(client: Client, name: int | str, due: list[RemoteReader]) -> None:
    """Abort requests by their id or label, twice: the first call ends those that are due."""
    for expected in (len(due), 0):
        for reader in due:
            reader.aborted = True
        ended = client.abort(name)
        assert ended == expected, f"abort({name!r}) returned {ended}, and {expected} were going"


@dataclass
class OneShot:
    """A task that awaits `client.generate`."""

    life: Life
    faults: InjectedFaults
    line: Line
    content: Content
    params: SamplingParams
    wait: bool | None
    timeout: float | None
    label: str
    deadline: float = math.inf
    late_at: float = math.inf  # when it was first found past it
    completion: Completion | None = None
    error: EngineError | None = None
    aborted: bool = False
    over: bool = False
    checked: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    async def run(self) -> None:
        LINE.set(self.line)
        self.line.is_active = lambda: not self.over
        if self.timeout is not None:
            self.deadline = trio.current_time() + self.timeout
        try:
            with self.scope:
                self.completion = await self._generate()
                assert self.completion.cause is not Cause.TIMEOUT, "its timeout has ended it, and no error was raised"
        except RequestRejected as exc:  # judged when it is over
            self.error = exc
        except EngineError as exc:
            self.error = exc
            check_error(exc, self.line, self.life, self.faults, wait=self.wait, deadline=self.deadline)
            if isinstance(exc, TimedOut):
                self.completion = partial_of(exc)
        finally:
            self.over = True
            self.life.end()

    async def _generate(self) -> Completion:
        client = self.line.user.client
        assert client is not None, "it is started where there is one"
        prompt, media = text_of(self.content), cast("list[Media]", media_of(self.content))
        return await client.generate(
            prompt, self.params, media=media, wait=self.wait, timeout=self.timeout, label=self.label
        )

    def abort(self) -> None:
        """Abort it by its label."""
        client = self.line.user.client
        assert client is not None, "the call has begun"
        ended = client.abort(self.label)
        assert ended <= (0 if self.aborted else 1), f"abort({self.label!r}) returned {ended}, and there is one"
        self.aborted = self.aborted or ended > 0

    @property
    def causes(self) -> set[Cause]:
        """The causes by which its request may have been aborted by itself."""
        causes = {Cause.CLIENT} if self.aborted or self.scope.cancel_called else set()
        return causes | ({Cause.TIMEOUT} if trio.current_time() >= self.deadline else set())
