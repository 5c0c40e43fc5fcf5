"""Replays: what becomes of the requests in flight when their worker is lost.

They are suspended, and go on with the next worker, which is given their prompt and what was delivered of the answer.
A request that kills the worker must not take the others along. So whoever was in flight at two deaths and got nothing
in between is a *suspect*. Suspects are tried before anybody else goes on: one at a time, in the order of their
admission, and alone, as nothing is admitted meanwhile. Who gets a token is cleared, and waits, detached again, until
all were tried. A death is held against the one that is tried, and a second one ends it; it costs nobody an attempt.
"""

from __future__ import annotations

from typing import NamedTuple

from trioengine.actors.gate import Gate
from trioengine.actors.generation import Generation, Losses
from trioengine.actors.link import Link
from trioengine.actors.session import Session
from trioengine.actors.session_state import SessionState
from trioengine.actors.sessions import Sessions
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError
from trioengine.core.lifecycle import Phase, PowerEvent

MAX_RESUMES = 3
MAX_DEATHS_ALONE = 2


class _Trial(NamedTuple):
    """A suspect that goes on alone: until it has got something, or is over, and the worker has let go of it again."""

    session: Session
    generation: Generation


class Replays:
    """Those of one engine. Synchronous: a death is settled, and a READY followed up, in one step."""

    def __init__(self, config: EngineConfig, gate: Gate, sessions: Sessions) -> None:
        self._goes_on = config.on_worker_loss == "resume"
        self._gate = gate
        self._sessions = sessions
        self._suspects: list[Generation] = []
        self._trial: _Trial | None = None

    @property
    def has_suspects(self) -> bool:
        """Whether one is being tried, or waits to be."""
        return self._trial is not None or bool(self._suspects)

    # ---- deaths ---------------------------------------------------------------------------------------------------

    def on_worker_lost(self, lost: list[Session], error: EngineError) -> bool:
        """Decide about the requests that ran, which are suspended now; whether the death counts against the worker."""
        if not self._goes_on:
            self._give_up(lost, error)
            return True
        unlucky = [session for session in lost if not _got_something(session)]
        for session in lost:
            losses = _losses(session)
            losses.is_new, losses.num_tokens = True, _generation(session).num_tokens
        trial, self._trial = self._trial, None
        if trial is not None:
            self._hold_against(trial.generation, error)
        elif unlucky:
            self._suspects = [_generation(session) for session in unlucky] + self._suspects
        else:
            self._count(lost, error)
        self._note_suspects()
        return trial is None

    def give_up_all(self, error: EngineError) -> None:
        """No worker will come."""
        self._give_up(self._sessions.suspended, error)

    def _hold_against(self, tried: Generation, error: EngineError) -> None:
        """It was alone; it may have been cleared or aborted already, and then it is not at fault."""
        session = self._suspended(tried)
        if session is None or not tried.losses.is_new:
            return
        tried.losses.deaths_alone += 1
        if tried.losses.deaths_alone == MAX_DEATHS_ALONE:
            self._give_up([session], error)
        else:
            self._suspects.insert(0, tried)

    def _count(self, lost: list[Session], error: EngineError) -> None:
        exhausted = [session for session in lost if _losses(session).deaths == MAX_RESUMES]
        self._give_up(exhausted, error)
        for session in lost:
            if session not in exhausted:
                _losses(session).deaths += 1

    def _give_up(self, sessions: list[Session], error: EngineError) -> None:
        for session in sessions:
            self._sessions.give_up(session, error)

    # ---- going on -------------------------------------------------------------------------------------------------

    def resume(self, link: Link) -> None:
        """There is a worker: everything suspended goes on; where there are suspects, one of them alone."""
        if self._trial is not None:
            return
        while self._suspects:
            suspect = self._suspects.pop(0)
            session = self._suspended(suspect)
            if session is not None and self._resume(session, link):
                self._trial = _Trial(session, suspect)
                return
        self._note_suspects()
        for session in self._sessions.suspended:
            self._resume(session, link)

    def forget_suspects(self) -> None:
        """All are suspended for another reason, and will go on together."""
        self._suspects.clear()
        self._trial = None
        self._note_suspects()

    def on_progress(self, session: SessionState, generation: Generation) -> None:
        """A request got a token, or is over: if it was tried, it is cleared."""
        if self._trial is None or generation is not self._trial.generation:
            return
        if session.phase is Phase.RUNNING:
            self._sessions.detach(session)
        elif session.generation is not generation and not session.is_detaching:  # it is over
            self._try_next()

    def on_detached(self, session: Session) -> None:
        """The worker has let go of a session: if its request was cleared, the next one is tried."""
        if self._trial is not None and session is self._trial.session:
            self._try_next()

    def _try_next(self) -> None:
        self._trial = None
        if self._gate.link is not None:
            self.resume(self._gate.link)
            if not self.has_suspects:
                self._gate.change_power(PowerEvent.READY)

    def _suspended(self, generation: Generation) -> Session | None:
        """Its session, if it still waits for a worker."""
        return next((each for each in self._sessions.suspended if each.generation is generation), None)

    def _resume(self, session: Session, link: Link) -> bool:
        """Whether it goes on: it is over where an image of its was dropped meanwhile."""
        generation = _generation(session)
        self._sessions.resume(session, link)
        goes_on = session.phase is Phase.RUNNING
        if goes_on and generation.losses.is_new:
            generation.losses.is_new = False
            generation.losses.resumed += 1
            generation.times.resume()
        return goes_on

    def _note_suspects(self) -> None:
        self._gate.is_trying = self.has_suspects


def _generation(session: Session) -> Generation:
    assert session.generation is not None, "it has a request in flight"
    return session.generation


def _losses(session: Session) -> Losses:
    return _generation(session).losses


def _got_something(session: Session) -> bool:
    """Whether it got a token since the death before this one; true where there was none."""
    return _losses(session).num_tokens < _generation(session).num_tokens
