"""The states that an engine goes through, for those who want to hear of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from trioengine.aio.nursery import Notifier
from trioengine.core.lifecycle import Power
from trioengine.core.power import Tag

MAX_UNREAD = 64


@dataclass(frozen=True, slots=True)
class PowerState:
    """The state of an engine: what sleeps of it, at which level, and which weights it has."""

    power: Power
    level: int | None  # None: nothing sleeps
    asleep: frozenset[Tag]
    weight_version: int


class States:
    """`with engine.states() as states: async for state in states`: the state now, then each that follows.

    It ends when the engine is closed. Of more than 64 that were not read the oldest are dropped. Cancelling a read
    loses nothing.
    """

    def __init__(self, listeners: set[States], now: Callable[[], PowerState]) -> None:
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
        """The engine has changed."""
        self._unread.append(state)
        self._is_over = state.power is Power.CLOSED
        self._changes.notify()
