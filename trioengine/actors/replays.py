"""Replays: what becomes of the requests in flight when their worker is lost.

They are suspended, and go on with the next worker, which is given their prompt and what was delivered of the answer.
A request that kills the worker must not take the others along. So when one of them was in flight at two deaths and got
nothing in between, all are *suspects*: they are tried one at a time, in the order of their admission, and nothing new
is admitted meanwhile. Who gets a token, or ends, is none any more; a death is held against the one that is tried, and
a second one ends it.
"""

from __future__ import annotations

from trioengine.actors.gate import Gate
from trioengine.actors.generation import Generation, Losses
from trioengine.actors.link import Link
from trioengine.actors.session import Session
from trioengine.actors.sessions import Sessions
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError
from trioengine.core.lifecycle import Phase, PowerEvent

MAX_RESUMES = 3
MAX_DEATHS_ALONE = 2


class Replays:
    """Those of one engine. Synchronous: a death is settled, and a READY followed up, in one step."""

    def __init__(self, config: EngineConfig, gate: Gate, sessions: Sessions) -> None:
        self._goes_on = config.on_worker_loss == "resume"
        self._gate = gate
        self._sessions = sessions
        self._suspects: list[tuple[Session, Generation]] = []
        self._tried: Generation | None = None

    @property
    def has_suspects(self) -> bool:
        """Whether one is being tried, or waits to be."""
        return self._tried is not None or bool(self._suspects)

    # ---- deaths ---------------------------------------------------------------------------------------------------

    def on_worker_lost(self, lost: list[Session], error: EngineError) -> bool:
        """Decide about the requests that ran, which are suspended now; whether the death counts against the worker."""
        if not self._goes_on:
            self._give_up(lost, error)
            return True
        for session in lost:
            self._losses(session).is_new = True
        tried, self._tried = self._tried, None
        culprit = next((session for session in lost if session.generation is tried), None)
        if culprit is not None:
            self._hold_against(culprit, error)
            return False
        exhausted = [session for session in lost if self._losses(session).deaths == MAX_RESUMES]
        self._give_up(exhausted, error)
        going_on = [session for session in lost if session not in exhausted]
        if not all(map(self._got_something, going_on)):
            self._suspects = [(session, _generation(session)) for session in going_on]
        for session in going_on:
            losses = self._losses(session)
            losses.deaths += 1
            losses.num_tokens = _generation(session).num_tokens
        return True

    def give_up_all(self, error: EngineError) -> None:
        """No worker will come."""
        self._give_up(self._sessions.suspended, error)

    def _hold_against(self, session: Session, error: EngineError) -> None:
        losses = self._losses(session)
        losses.deaths_alone += 1
        if losses.deaths_alone == MAX_DEATHS_ALONE:
            self._give_up([session], error)
        else:
            self._suspects.insert(0, (session, _generation(session)))

    def _give_up(self, sessions: list[Session], error: EngineError) -> None:
        for session in sessions:
            self._sessions.give_up(session, error)

    def _got_something(self, session: Session) -> bool:
        """Whether it got a token since the death before this one; true where there was none."""
        return self._losses(session).num_tokens < _generation(session).num_tokens

    def _losses(self, session: Session) -> Losses:
        return _generation(session).losses

    # ---- going on -------------------------------------------------------------------------------------------------

    def resume(self, link: Link) -> None:
        """There is a worker: everything suspended goes on, but for suspects, of which the first is tried."""
        suspects = [generation for _, generation in self._suspects]
        for session in self._sessions.suspended:
            if session.generation not in suspects:
                self._resume(session, link)
        self._try_next(link)

    def forget_suspects(self) -> None:
        """All are suspended for another reason, and will go on with a worker that has done nothing yet."""
        self._suspects.clear()
        self._tried = None

    def on_progress(self, generation: Generation) -> None:
        """A request got a token, or is over: if it was tried, it is no suspect any more."""
        if generation is not self._tried:
            return
        self._tried = None
        if self._gate.link is not None:
            self._try_next(self._gate.link)
            if not self.has_suspects:
                self._gate.change_power(PowerEvent.READY)

    def _try_next(self, link: Link) -> None:
        while self._suspects and self._tried is None:
            session, generation = self._suspects.pop(0)
            if session.generation is generation and session.phase is Phase.SUSPENDED:
                self._tried = generation
                self._resume(session, link)

    def _resume(self, session: Session, link: Link) -> None:
        losses = self._losses(session)
        if losses.is_new:
            losses.is_new = False
            losses.resumed += 1
            _generation(session).times.resume()
        self._sessions.resume(session, link)


def _generation(session: Session) -> Generation:
    assert session.generation is not None, "it has a request in flight"
    return session.generation
