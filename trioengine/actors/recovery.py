"""Recovery: the fate of the requests in flight when their worker is lost.

They are suspended, and go on with the next worker, which is given their prompt and the delivered part of the answer.
A request that kills the worker must not take the others along. So a request that was in flight at two deaths and got
nothing in between is a *suspect*. Suspects are probed before any other request goes on: one at a time, in the order of
their admission, and alone, because nothing is committed meanwhile (`Gate.committing_link`). A suspect that gets a token
is cleared, and waits, detached again, until all were probed. A death counts against the probed request alone, and a
second one ends it.
"""

from __future__ import annotations

from trioengine.actors.gate import Gate
from trioengine.actors.link import Link
from trioengine.actors.request import RecoveryRecord, Request
from trioengine.actors.session_actor import SessionActor
from trioengine.actors.sessions import Sessions
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError
from trioengine.core.lifecycle import Phase, PowerEvent

MAX_RESUMES = 3
MAX_DEATHS_ALONE = 2


class Recovery:
    """Decides about the requests of one engine. A death is settled, and a READY followed up, in one step."""

    def __init__(self, config: EngineConfig, gate: Gate, sessions: Sessions) -> None:
        self._resumes = config.on_worker_loss == "resume"
        self._gate = gate
        self._sessions = sessions
        self._suspects: list[Request] = []
        # the suspect that runs alone, until it has got a token, or is over, and the worker has let go of it again
        self.probed: Request | None = None

    @property
    def has_suspects(self) -> bool:
        """Whether a suspect is being probed, or waits to be."""
        return self.probed is not None or bool(self._suspects)

    # ---- deaths ---------------------------------------------------------------------------------------------------

    def on_worker_lost(self, lost: list[SessionActor], error: EngineError) -> bool:
        """Decide about the requests that ran, which are suspended now. Returns whether the worker is to blame."""
        if not self._resumes:
            self._give_up(lost, error)
            return True
        without_token = [session for session in lost if _record(session).num_tokens >= _request(session).num_tokens]
        for session in lost:
            record = _record(session)
            record.is_new, record.num_tokens = True, _request(session).num_tokens
        probed, self.probed = self.probed, None
        if probed is not None:
            self._blame(probed, error)
        elif without_token:
            self._suspects = [_request(session) for session in without_token] + self._suspects
        else:
            self._count(lost, error)
        return probed is None

    def give_up_all(self, error: EngineError) -> None:
        """No worker will come."""
        self._give_up(self._sessions.suspended, error)

    def _blame(self, probed: Request, error: EngineError) -> None:
        """It ran alone; if it was cleared or aborted already, the death does not count against it."""
        session = self._suspended(probed)
        if session is None or not probed.recovery.is_new:
            return
        probed.recovery.deaths_alone += 1
        if probed.recovery.deaths_alone == MAX_DEATHS_ALONE:
            self._give_up([session], error)
        else:
            self._suspects.insert(0, probed)

    def _count(self, lost: list[SessionActor], error: EngineError) -> None:
        exhausted = [session for session in lost if _record(session).deaths == MAX_RESUMES]
        self._give_up(exhausted, error)
        for session in lost:
            if session not in exhausted:
                _record(session).deaths += 1

    def _give_up(self, sessions: list[SessionActor], error: EngineError) -> None:
        for session in sessions:
            session.attempt(session.give_up, error)

    # ---- going on -------------------------------------------------------------------------------------------------

    def resume(self, link: Link) -> None:
        """There is a worker: let everything suspended go on or, while there are suspects, one of them alone."""
        if self.probed is not None:
            return
        while self._suspects:
            suspect = self._suspects.pop(0)
            session = self._suspended(suspect)
            if session is not None and self._resume(session, link):
                self.probed = suspect
                return
        for session in self._sessions.suspended:
            self._resume(session, link)

    def forget_suspects(self) -> None:
        """All requests are suspended for another reason, and will go on together."""
        self._suspects.clear()
        self.probed = None

    def on_progress(self, session: SessionActor, request: Request) -> None:
        """A request got a token, or is over: if it is the probed one, it is cleared."""
        if request is not self.probed:
            return
        if session.phase is Phase.RUNNING:
            session.attempt(session.detach)
        elif session.request is not request and not session.lifecycle.is_detaching:  # it is over
            self._probe_next()

    def on_detached(self, session: SessionActor) -> None:
        """The worker has let go of a session: if its request was cleared, probe the next one."""
        if self.probed is not None and session is self.probed.session:
            self._probe_next()

    def _probe_next(self) -> None:
        self.probed = None
        if self._gate.link is not None:
            self.resume(self._gate.link)
            if not self.has_suspects:
                self._gate.change_power(PowerEvent.READY)

    def _suspended(self, request: Request) -> SessionActor | None:
        """The request's session, if it still waits for a worker."""
        return next((each for each in self._sessions.suspended if each.request is request), None)

    def _resume(self, session: SessionActor, link: Link) -> bool:
        """Whether the request goes on: it is over where an image of its prompt was dropped meanwhile."""
        request = _request(session)
        session.attempt(session.resume, link)
        goes_on = session.phase is Phase.RUNNING
        if goes_on and request.recovery.is_new:
            request.recovery.is_new = False
            request.recovery.resumed += 1
            request.times.resume()
        return goes_on


def _request(session: SessionActor) -> Request:
    assert session.request is not None, "it has a request in flight"
    return session.request


def _record(session: SessionActor) -> RecoveryRecord:
    return _request(session).recovery
