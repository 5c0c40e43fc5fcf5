"""The sessions of an engine: every one whose slot is taken, by its id, and what concerns them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVarTuple

import trio

from trioengine.actors.link import Link
from trioengine.actors.session import Session
from trioengine.actors.session_state import SessionState
from trioengine.core.errors import EngineError
from trioengine.core.lifecycle import Phase
from trioengine.core.messages import RequestFailed, SessionEnded, Tokens
from trioengine.core.types import Cause

Args = TypeVarTuple("Args")


class Sessions:
    """Those of one engine. A bug in one session's handling ends that session alone."""

    def __init__(self) -> None:
        self._by_id: dict[int, Session] = {}
        self._opening: dict[Session, None] = {}  # without a slot, and so without an id, in the order of their arrival

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        """As they are now: telling one may end it."""
        return iter(list(self._by_id.values()))

    @contextmanager
    def opening(self, session: Session) -> Iterator[None]:
        """Within, a session waits for its slot."""
        self._opening[session] = None
        try:
            yield
        finally:
            del self._opening[session]

    def add(self, session: Session) -> None:
        assert session.id is not None, "only an entered session is added"
        self._by_id[session.id] = session

    def remove(self, session: Session) -> None:
        assert session.id is not None, "only an added session is removed"
        del self._by_id[session.id]

    @property
    def attached(self) -> frozenset[int]:
        """Those that were added to the worker and not told to end."""
        return frozenset(id for id, session in self._by_id.items() if session.is_open_on_worker)

    @property
    def any_on_worker(self) -> bool:
        """Whether the worker holds one, which it may have been told to end."""
        return any(session.attached for session in self._by_id.values())

    @property
    def suspended(self) -> list[Session]:
        """Those whose request is to go on, and is at no worker, in the order of its admission."""
        found = (each for each in self if each.phase is Phase.SUSPENDED and not each.attached)
        return sorted(found, key=lambda session: session.request_id)

    @property
    def running(self) -> list[Session]:
        """Those whose request is at the worker and goes on, in the order of its admission."""
        found = (each for each in self if each.phase is Phase.RUNNING)
        return sorted(found, key=lambda session: session.request_id)

    def end_all(self, cause: Cause) -> None:
        """No session outlives the engine, also one whose task never ran."""
        for session in self:
            session.end(cause)

    def abort(self, request: int | str, cause: Cause) -> int:
        """Abort the request of this id, or all of this label, in line or in flight; returns how many this call ends."""
        found = [
            (session, generation)
            for session in (*self._opening, *self)
            for generation in session.requests
            if generation.is_called(request)
        ]
        return sum(session.abort_request(generation, cause) for session, generation in found)

    def abort_all(self, cause: Cause) -> int:
        """Abort every request in flight; those that get the slots of the aborted ones go on.

        Returns how many this call aborts.
        """
        in_flight = [(session, session.generation) for session in self if session.generation is not None]
        return sum(session.abort_request(generation, cause) for session, generation in in_flight)

    def abort_waiting(self, cause: Cause) -> int:
        """Abort all that waits for a slot; returns how many requests that were."""
        return sum(session.abort_waiting(cause) for session in [*self._opening, *self])

    def abort_phase(self, phase: Phase, cause: Cause) -> int:
        """Abort the requests that are in this phase, and return how many there were."""
        count = 0
        for session in self:
            if session.phase is phase and session.generation is not None:
                count += session.abort_request(session.generation, cause)
        return count

    # ---- requests that outlive an attachment ----------------------------------------------------------------------

    def detach(self, session: SessionState) -> None:
        """The worker is to forget it."""
        assert session.id is not None, "only an entered session is attached"
        self._tell(session.id, Session.detach)

    def detach_all(self) -> int:
        """The worker is to forget every session. Returns how many it was not told to end before."""
        count = len(self.attached)
        for session in self:
            self.detach(session)
        return count

    def resume(self, session: Session, link: Link) -> None:
        """Let its suspended request go on."""
        assert session.id is not None, "only an entered session has a request"
        self._tell(session.id, Session.resume, link)

    def give_up(self, session: Session, error: EngineError) -> None:
        """Its suspended request does not go on."""
        assert session.id is not None, "only an entered session has a request"
        self._tell(session.id, Session.give_up, error)

    # ---- what the worker says -------------------------------------------------------------------------------------

    def on_tokens(self, message: Tokens) -> None:
        """The rows of a step. Not by `_tell`: every token comes through here."""
        now = trio.current_time()
        sessions = [self._by_id[row.session] for row in message.rows]
        for session, row in zip(sessions, message.rows, strict=True):
            try:
                session.on_row(row, now)
            except Exception as exc:
                session.crash(exc)
        for session in sessions:
            try:
                session.tell_reader()
            except Exception as exc:
                session.crash(exc)

    def on_failed(self, message: RequestFailed) -> None:
        self._tell(message.session, Session.on_failed, message)

    def on_ended(self, message: SessionEnded) -> Session:
        """The worker has let go of it."""
        session = self._by_id[message.session]
        self._tell(message.session, Session.on_ended)
        return session

    def on_worker_lost(self) -> None:
        for session_id in list(self._by_id):
            self._tell(session_id, Session.on_worker_lost)

    def _tell(self, session_id: int, tell: Callable[[Session, *Args], None], *args: *Args) -> None:
        session = self._by_id[session_id]
        try:
            tell(session, *args)
        except Exception as exc:
            session.crash(exc)
