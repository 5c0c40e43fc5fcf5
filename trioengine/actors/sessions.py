"""The sessions of an engine: a registry by id, and the operations on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trioengine.actors.effects import Effects
from trioengine.actors.request import Request
from trioengine.actors.session_actor import SessionActor
from trioengine.core.lifecycle import Phase
from trioengine.core.types import Cause


class Sessions:
    """Every session that has a slot, by its id, and those that wait for one.

    An operation on all of them acts on those that were there when it began: a slot that it gives back goes to the next
    in line, whose request is not affected.
    """

    def __init__(self, effects: Effects) -> None:
        self.by_id: dict[int, SessionActor] = {}
        self._opening: dict[SessionActor, None] = {}  # without a slot, and so without an id, in the order of arrival
        self._effects = effects

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[SessionActor]:
        """The sessions with a slot at this moment, in the order of their ids."""
        return iter(list(self.by_id.values()))

    @contextmanager
    def opening(self, session: SessionActor) -> Iterator[None]:
        """Within, a session waits for its slot."""
        self._opening[session] = None
        try:
            yield
        finally:
            del self._opening[session]

    def add(self, session: SessionActor) -> None:
        assert session.id is not None, "only a session with a slot is added"
        self.by_id[session.id] = session

    def remove(self, session: SessionActor) -> None:
        assert session.id is not None, "only an added session is removed"
        del self.by_id[session.id]

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def all(self) -> list[SessionActor]:
        """The sessions that wait for their slot, then those that have one; one that has just got it is in both."""
        return list(dict.fromkeys((*self._opening, *self)))

    def prompt_text(self, session: int | None) -> str:
        """The text of the prompt of the request of a session; empty without a request, and for token ids."""
        state = None if session is None else self.by_id.get(session)
        prepared = None if state is None or state.request is None else state.request.prepared
        return "" if prepared is None else prepared.rendering

    @property
    def attached(self) -> frozenset[int]:
        """The ids of the sessions that were added to the worker, and no END_SESSION posted."""
        return frozenset(id for id, session in self.by_id.items() if session.lifecycle.is_open_on_worker)

    @property
    def any_on_worker(self) -> bool:
        """Whether the worker holds a session; END_SESSION may be on its way."""
        return any(session.lifecycle.is_attached for session in self.by_id.values())

    @property
    def suspended(self) -> list[SessionActor]:
        """The sessions whose request waits for a worker, in the order of its admission."""
        return _by_request(each for each in self if each.phase is Phase.SUSPENDED and not each.lifecycle.is_attached)

    @property
    def running(self) -> list[SessionActor]:
        """The sessions whose request runs on the worker, in the order of its admission."""
        return _by_request(each for each in self if each.phase is Phase.RUNNING)

    @property
    def _in_flight(self) -> list[tuple[SessionActor, Request]]:
        return [(session, session.request) for session in self if session.request is not None]

    # ---- operations on all ------------------------------------------------------------------------------------------

    def end_all(self, cause: Cause) -> None:
        """End every session, also one whose task never ran."""
        for session in self:
            session.end(cause)

    def abort(self, request: int | str, cause: Cause) -> int:
        """Abort the request of this id, or all of this label, in line or in flight; returns how many this call ends."""
        found = [(session, each) for session in self.all for each in session.requests if each.is_called(request)]
        return sum(session.abort_request(each, cause) for session, each in found)

    def abort_all(self, cause: Cause) -> int:
        """Abort every request in flight; those that get the slots of the aborted ones go on. Returns how many."""
        return sum(session.abort_request(request, cause) for session, request in self._in_flight)

    def abort_waiting(self, cause: Cause) -> int:
        """Abort everything that waits for a slot; returns how many requests that were."""
        return sum(session.abort_waiting(cause) for session in [*self._opening, *self])

    def abort_preparing(self, cause: Cause) -> int:
        """Abort the requests whose prompt is being prepared; not those behind a leader. Returns how many."""
        return sum(
            session.abort_request(request, cause)
            for session, request in self._in_flight
            if session.phase is Phase.PREPARING and request.leader is None
        )

    def abort_suspended(self, cause: Cause) -> int:
        """Abort the requests that are suspended. Returns how many."""
        return sum(
            session.abort_request(request, cause)
            for session, request in self._in_flight
            if session.phase is Phase.SUSPENDED
        )

    def detach_all(self) -> int:
        """Take every session off the worker. Returns how many END_SESSIONs were posted for it."""
        attached = [session for session in self if session.lifecycle.is_open_on_worker]
        for session in attached:
            session.attempt(session.detach)
        self._effects.drain()
        return len(attached)


def _by_request(sessions: Iterator[SessionActor]) -> list[SessionActor]:
    return sorted(sessions, key=lambda session: 0 if session.request is None else session.request.id or 0)
