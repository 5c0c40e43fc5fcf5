"""The sessions of a server that outlive a lost connection: found by their tokens, run in the server's nursery.

An engine that falls asleep, gets other weights, drains or aborts all requests also ends the sessions whose client is
away at that moment.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from contextlib import ExitStack

import trio

from trioengine.actors.observer import Observer
from trioengine.core.lifecycle import PowerEvent, PowerStage
from trioengine.core.types import Cause
from trioengine.serve.errors import ClientError
from trioengine.serve.realtime.connection import RealtimeConnection
from trioengine.serve.realtime.window import Window

logger = logging.getLogger("trioengine")
_ENDS = (PowerEvent.SLEEP, PowerEvent.UPDATE, PowerEvent.DRAIN, PowerEvent.CLOSE)
_NO_KEY = b""  # of a server without keys


class ResumableSessions(Observer):
    """The sessions by the digests of their tokens and keys, so that a lookup takes the same time for every token.

    It is one of the engine's observers only while there is a session: an observer has a call for every token.
    """

    def __init__(self, observers: list[Observer]) -> None:
        """`observers` are the engine's."""
        self._observers = observers
        self._sessions: dict[bytes, RealtimeConnection] = {}
        self._nursery: trio.Nursery | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def run_in(self, nursery: trio.Nursery) -> None:
        """Set the nursery, after which sessions may start."""
        self._nursery = nursery

    def start(self, session: RealtimeConnection, window: Window, key: bytes | None, resources: ExitStack) -> None:
        """Start a session of the client with this key. At its end the resources are closed."""
        assert self._nursery is not None, "run_in comes before start"
        if not self._sessions:
            self._observers.append(self)
        name = _name(window.token, key)
        self._sessions[name] = session
        resources.callback(self._forget, name)
        resources.callback(session.stop_sending)  # before its bytes are given back
        self._nursery.start_soon(_run, session, resources)

    def _forget(self, name: bytes) -> None:
        del self._sessions[name]
        if not self._sessions:
            self._observers.remove(self)

    def find(self, token: str, key: bytes | None) -> RealtimeConnection:
        """Return a session that goes on. Raises ClientError, the same one for every reason."""
        session = self._sessions.get(_name(token, key))
        if session is None or session.is_over:
            message = "no session of this key has this token: it has ended, or never began"
            raise ClientError("session_not_found", message, param="session")
        return session

    def power_moved(self, stage: PowerStage, event: PowerEvent) -> None:
        if event in _ENDS:
            self._cut_windows()

    def all_aborted(self, cause: Cause) -> None:
        self._cut_windows()

    def _cut_windows(self) -> None:
        for session in self._sessions.values():
            session.cut_window()


def _name(token: str, key: bytes | None) -> bytes:
    """Return a digest that discloses neither the token nor the key by the time of its comparisons."""
    return hmac.digest(_NO_KEY if key is None else key, token.encode(errors="replace"), hashlib.sha256)


async def _run(session: RealtimeConnection, resources: ExitStack) -> None:
    """Run a session; a bug of ours ends it alone."""
    with resources:
        try:
            await session.run()
        except* Exception as group:
            logger.error("a session crashed and was closed", exc_info=group)
        await session.closed()
