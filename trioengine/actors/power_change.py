"""A sleep, wake or update as it is requested, its arguments checked; and subscriptions to the engine's states."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeAlias

import trio

from trioengine.aio.concurrency import Notifier
from trioengine.core.checks import check_flag, integer, number, rejected
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import TransitionFailed
from trioengine.core.lifecycle import Power
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.core.wording import brief

logger = logging.getLogger("trioengine")
MAX_PATH = 4096  # characters


class Mode(enum.StrEnum):
    """The effect of a sleep or an update on the requests in flight."""

    ABORT = "abort"  # they end, with cause `sleep` and the text so far
    WAIT = "wait"  # they finish; after the timeout the rest is aborted
    KEEP = "keep"  # they are suspended, and go on afterwards


Level: TypeAlias = Literal[1, 2]
ModeName: TypeAlias = Literal["abort", "wait", "keep"]


class InFlightPolicy(NamedTuple):
    """How requests in flight end or go on; with mode WAIT they may run for `timeout` more seconds."""

    mode: Mode
    timeout: float | None
    aborts_waiting: bool = False  # requests and sessions that wait for a slot


class Weights(NamedTuple):
    """The weights of the model: a file or directory, and their version, which counts from 1."""

    path: str
    version: int


@dataclass(eq=False)
class PowerChange:
    """A sleep, wake or update that was requested; `make(change)` makes it, and `name` stands in the log."""

    name: str
    make: Callable[[PowerChange], Awaitable[None]]
    blocks_admission: bool  # until it is done
    done: trio.Event = field(default_factory=trio.Event)
    failure: TransitionFailed | None = None
    num_aborted: int = 0  # requests

    def log(self, message: str, *values: object) -> None:
        """Log at INFO, under its name."""
        logger.info(f"%s: {message}", self.name, *values)

    async def wait(self) -> None:
        """Wait until it is done. Raises TransitionFailed if it failed. Cancelled, the change goes on."""
        await self.done.wait()
        if self.failure is not None:
            raise copy(self.failure)


def level_of(level: object) -> int:
    try:
        return integer(level, 1, 2)
    except ValueError as exc:
        raise rejected("level", str(exc)) from None


def check_policy(mode: object, timeout: object, *, keep_waiting: object = True) -> InFlightPolicy:
    if mode not in [each.value for each in Mode]:
        raise rejected("mode", f"must be abort, wait or keep, got {brief(mode)}")
    keeps = check_flag("keep_waiting", keep_waiting)
    if timeout is None:
        return InFlightPolicy(Mode(mode), None, aborts_waiting=mode == Mode.ABORT.value and not keeps)
    if mode != Mode.WAIT.value:
        raise rejected("timeout", f"is for mode wait, not {mode}")
    try:
        return InFlightPolicy(Mode.WAIT, number(timeout, 0, MAX_SECONDS))
    except ValueError as exc:
        raise rejected("timeout", str(exc)) from None


def tags_of(tags: Collection[str] | None) -> frozenset[Tag]:
    """Return the tags: all of them for None, one for a string."""
    if tags is None:
        return ALL_TAGS
    try:
        chosen = frozenset(map(Tag, (tags,) if isinstance(tags, str) else tags))
    except (TypeError, ValueError):
        chosen = frozenset()
    if not chosen:
        known = ", ".join(sorted(tag.value for tag in Tag))
        raise rejected("tags", f"must be some of {known}, got {brief(tags)}")
    return chosen


def path_of(path: object) -> str:
    text = str(path) if isinstance(path, str | Path) else ""
    if not text or len(text) > MAX_PATH or not text.isprintable():  # lone surrogates are not
        raise rejected("path", f"must be a file or directory, got {brief(path)}")
    return text


MAX_UNREAD = 64


@dataclass(frozen=True, slots=True)
class PowerState:
    """The state of an engine, with its sleeping tags, the level of the sleep, and the version of its weights."""

    power: Power
    level: int | None  # None: nothing sleeps
    asleep: frozenset[Tag]
    weight_version: int


class StateSubscription:
    """`with engine.states() as states: async for state in states`: the state now, then each that follows.

    It ends when the engine is closed. Of more than 64 that were not read the oldest are dropped. Cancelling a read
    loses nothing.
    """

    def __init__(self, listeners: set[StateSubscription], now: Callable[[], PowerState]) -> None:
        self._unread: deque[PowerState] = deque(maxlen=MAX_UNREAD)
        self._changes = Notifier()
        self._listeners = listeners
        self._now = now
        self._is_over = False

    def __enter__(self) -> Self:
        self._listeners.add(self)
        self.put(self._now())
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listeners.discard(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PowerState:
        while not self._unread:
            if self._is_over:
                raise StopAsyncIteration
            await self._changes.wait()
        return self._unread.popleft()

    def put(self, state: PowerState) -> None:
        """Add a state that the engine has now."""
        self._unread.append(state)
        self._is_over = state.power is Power.CLOSED
        self._changes.notify()
