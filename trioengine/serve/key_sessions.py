"""The sessions of each key: one for a WebSocket's session, and one for each choice of a request until it is answered.

A request takes its first session before its body is read. It takes those for all choices of its first prompt at once,
or none; the choices of its other prompts wait until the key has a session for them, or the request has one to spare.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from trioengine.aio.concurrency import Notifier
from trioengine.serve.errors import RATE_LIMIT, ClientError, OverBudget, Problem


class KeySessions:
    """The counts of one server, by the keys' digests: at most `most` of each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.changed = Notifier()  # sessions were given back
        self._counts: dict[bytes, int] = {}  # none is 0

    def __len__(self) -> int:
        """Return the number of keys with sessions."""
        return len(self._counts)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._counts)

    @contextmanager
    def holding(self, key: bytes, count: int = 1) -> Iterator[SessionShare]:
        """Hold sessions for the block, and those that are added. Raises OverBudget if the key has too few."""
        share = SessionShare(self, key)
        share.claim(count)
        try:
            yield share
        finally:
            self.add(key, -share.num_held)

    def left(self, key: bytes) -> int:
        """Return how many more sessions the key may have."""
        return self.most - self._counts.get(key, 0)

    def add(self, key: bytes, count: int) -> None:
        """Count more sessions, or fewer if `count` is negative."""
        total = self._counts.pop(key, 0) + count
        if total:
            self._counts[key] = total
        if count < 0:
            self.changed.notify()


class SessionShare:
    """The sessions of one request or connection: at least one, unless they are `moved` or counted elsewhere."""

    __slots__ = ("_all", "_key", "_num_used", "num_held")

    def __init__(self, sessions: KeySessions, key: bytes) -> None:
        self.num_held = 0
        self._num_used = 0
        self._all = sessions
        self._key = key

    def claim(self, count: int) -> None:
        """Hold `count` sessions in all. Raises OverBudget if they are too many now, ClientError if they always are."""
        most, left = self._all.most, self._all.left(self._key)
        if count > most:
            message = f"n must be at most {most} (--max-sessions-per-key), got {count}"
            raise ClientError("invalid_value", message, param="n")
        if count - self.num_held > left:
            num_open = f"this key already has {most - left} requests, choices or connections open"
            message = f"{num_open} (the limit)" if not left else f"{num_open} of {most}, and n is {count}"
            raise OverBudget(429, Problem(RATE_LIMIT, "too_many_sessions", message, retry_after=1.0))
        self._hold(count - self.num_held)

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Hold its sessions for the block instead, which may outlast the request or connection."""
        count, self.num_held = self.num_held, 0
        try:
            yield
        finally:
            self._all.add(self._key, -count)

    @asynccontextmanager
    async def using(self) -> AsyncIterator[None]:
        """Use a session for the block: one that is held, or one more of the key. Waits until one is free."""
        while self._num_used == self.num_held and self._all.left(self._key) <= 0:
            await self._all.changed.wait()
        self._num_used += 1
        if self._num_used > self.num_held:
            self._hold(1)
        try:
            yield
        finally:
            self._num_used -= 1
            if self.num_held > 1:
                self._hold(-1)
            else:
                self._all.changed.notify()

    def _hold(self, count: int) -> None:
        self.num_held += count
        self._all.add(self._key, count)
