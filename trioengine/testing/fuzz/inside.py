"""Private state of the engine, for the fuzzer, whose other modules read no private attributes of it.

Its functions read state that the public API does not show; events are in `actors.observer`. `inside_payloads` and
`inside_server` are the same for payloads and for the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from trioengine.actors import audit, power_change
from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation, ReadableRequest
from trioengine.actors.images import KeptImages as KeptImages
from trioengine.actors.images import RequestImages as RequestImages
from trioengine.actors.incarnation import LAST_FRAMES_TIMEOUT as LAST_FRAMES_TIMEOUT
from trioengine.actors.link import Link as Link
from trioengine.actors.payload import Payload as Payload
from trioengine.actors.power import DO_NOT_WAKE as DO_NOT_WAKE
from trioengine.actors.power_change import PowerChange as PowerChange
from trioengine.actors.power_change import StateSubscription
from trioengine.actors.recovery import MAX_RESUMES as MAX_RESUMES
from trioengine.actors.request import Request as Request
from trioengine.actors.session import Session
from trioengine.actors.session_actor import SessionActor as SessionActor
from trioengine.actors.waiting_line import WaitingLine
from trioengine.actors.waiting_line import waits_for as waits_for
from trioengine.core.connection import Connection
from trioengine.core.ledger import RequestState
from trioengine.core.lifecycle import Phase, Power, PowerStage
from trioengine.core.messages import AddMessage
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.worker.scheduling.images import Picture
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus

GOING = (Phase.PREPARING, Phase.RUNNING, Phase.SUSPENDED)  # a request in flight that was not aborted
STOPPING = (Phase.STOPPING, Phase.ENDING)

# ---- the engine -----------------------------------------------------------------------------------------------------


def power(engine: Engine) -> Power:
    """The engine's state."""
    return engine.runtime.gate.power


def is_admitting(engine: Engine) -> bool:
    """Whether requests are admitted, where there is a slot."""
    return engine.runtime.gate.is_awake


def has_worker(engine: Engine) -> bool:
    """Whether a worker is READY."""
    return engine.runtime.gate.link is not None


def failure(engine: Engine) -> Exception | None:
    """The error by which the engine ended."""
    return engine.runtime.gate.failure


def num_sessions(engine: Engine) -> int:
    """Session slots taken, by the ledger."""
    return engine.runtime.gate.ledger.sessions


def num_in_flight(engine: Engine) -> int:
    """Request slots taken, by the ledger."""
    return engine.runtime.gate.ledger.in_flight


def num_claimed(engine: Engine) -> int:
    """Slots of each kind that are claimed for the choices of requests, and not taken."""
    return engine.runtime.gate._num_claimed


def num_preparing(engine: Engine) -> int:
    """Requests in preparation, by the ledger."""
    return engine.runtime.gate.ledger.preparing


def num_suspended(engine: Engine) -> int:
    """Suspended requests, by the ledger."""
    return engine.runtime.gate.ledger.suspended


def num_waiting_for_wake(engine: Engine) -> int:
    """Suspended requests of an engine that sleeps, and further choices, which wait for the first token of one."""
    if not engine.power.asleep:
        return 0
    suspended = [request for _, request in requests(engine) if request.state is RequestState.SUSPENDED]
    waits = (request.state is RequestState.PREPARING and request.leader in suspended for _, request in requests(engine))
    return num_suspended(engine) + sum(waits)


def num_waiting(engine: Engine) -> int:
    """Sessions and requests in line for a slot."""
    return len(engine.runtime.gate.requests) + len(engine.runtime.gate.sessions)


def is_change_pending(engine: Engine) -> bool:
    """Whether a sleep or an update is requested and not done."""
    return engine.runtime.gate.is_change_pending


def num_changes(engine: Engine) -> int:
    """Sleeps, wakes and updates that are requested and not done."""
    return len(engine.runtime.gate.changes)


def subscription(engine: Engine, max_unread: int) -> StateSubscription:
    """A subscription to the engine's states that keeps no more unread ones."""
    with replaced(power_change, "MAX_UNREAD", lambda _: max_unread):
        return engine.states()


def num_unread(states: StateSubscription) -> int:
    """States that were published and not read."""
    return len(states._unread)


def num_retired(engine: Engine) -> int:
    """Workers that were retired so that a fresh one takes their place."""
    return engine.runtime.supervisor.retired


def stage(engine: Engine) -> PowerStage:
    """The engine's state in detail."""
    return engine.runtime.gate.stage


def is_finishing(engine: Engine) -> bool:
    """Whether a sleep or an update lets the requests in flight finish."""
    return engine.runtime.gate.stage in (PowerStage.FINISHING_TO_SLEEP, PowerStage.FINISHING_TO_UPDATE)


def num_incarnations(engine: Engine) -> int:
    """Workers that were started, or could not be."""
    return engine.runtime.supervisor.incarnations


def worker_connection(engine: Engine) -> Connection | None:
    """The engine's end of the protocol with the worker that there is."""
    incarnation = engine.runtime.supervisor.current
    return None if incarnation is None else incarnation.link.connection


def mint_id(engine: Engine) -> int:
    """Mint an id, greater than the ids of all requests so far."""
    return engine.runtime.gate.mint()


def check_books(engine: Engine) -> None:
    """Raise InvariantError unless the ledger balances, agrees with the sessions, and no free slot is waited for."""
    engine.runtime.gate.check()
    audit.check_books(engine.runtime.gate.ledger, engine.runtime.sessions)


def waiting_in(line: object) -> Iterable[trio.lowlevel.Task]:
    """The tasks in a line, the first one first."""
    assert isinstance(line, WaitingLine), "lines are WaitingLines"
    return line._waiters.keys()


def num_in_line_for_slot(engine: Engine, *, is_session: bool) -> int:
    """How many wait for a slot of this kind."""
    return len(engine.runtime.gate.sessions if is_session else engine.runtime.gate.requests)


# ---- sessions and requests ------------------------------------------------------------------------------------------


def sessions(engine: Engine) -> list[SessionActor]:
    """The sessions that have a slot."""
    return list(engine.runtime.sessions)


def requests(engine: Engine) -> list[tuple[SessionActor, Request]]:
    """All requests in flight or on their way in, with their sessions, which may be on their way in themselves."""
    return [(session, request) for session in engine.runtime.sessions.all for request in session.requests]


def has_echo(engine: Engine) -> bool:
    """Whether the prompt of a request is scored, and no token of its answer has come."""
    return any(request.prompt_logprobs is not None and not request.num_tokens for _, request in requests(engine))


def names(engine: Engine) -> list[int | str]:
    """A name, for `Engine.abort`, of each request that has one: its label, or its id, which a request in line lacks."""
    found = (request.label or request.id for _, request in requests(engine))
    return [name for name in found if name is not None]


def called(engine: Engine, name: int | str) -> list[Request]:
    """The requests of this id or label that an abort would end."""
    return [
        request for request in undecided(engine) if name == (request.label if isinstance(name, str) else request.id)
    ]


def undecided(engine: Engine) -> list[Request]:
    """The requests that an abort would end."""
    return [request for _, request in requests(engine) if is_undecided(request)]


def in_flight(engine: Engine) -> list[Request]:
    """The requests that have a slot."""
    return [session.request for session in engine.runtime.sessions if session.request is not None]


def actor(session: Session | SessionActor) -> SessionActor:
    """The actor behind a session's handle."""
    return session._state if isinstance(session, Session) else session


def record(generation: Generation | Request) -> Request:
    """The engine's record behind a request's handle."""
    if isinstance(generation, Request):
        return generation
    assert isinstance(generation._state, Request), "it is a request of an engine"
    return generation._state


def _readable(generation: Generation | Request) -> ReadableRequest:
    """The record behind a request's handle, of an engine or of a client."""
    return generation._state if isinstance(generation, Generation) else generation


def phase(session: Session | SessionActor) -> Phase:
    """The session's phase in the lifecycle table."""
    return actor(session).phase


def request_of(session: Session | SessionActor) -> Request | None:
    """The session's request in flight."""
    return actor(session).request


def request_id(session: object) -> int:
    """The id of the session's request in flight."""
    assert isinstance(session, SessionActor) and session.request is not None, "it has one"
    assert session.request.id is not None, "a request in flight has its id"
    return session.request.id


def is_attached(session: Session | SessionActor) -> bool:
    """Whether the worker holds the session; END_SESSION may be on its way."""
    return actor(session).lifecycle.is_attached


def session_of(generation: Generation | Request) -> SessionActor:
    """The session of a request."""
    session = record(generation).session
    assert isinstance(session, SessionActor), "a request belongs to a session"
    return session


def is_in_flight(generation: Generation | Request) -> bool:
    """Whether the request has a slot."""
    return session_of(generation).request is record(generation)


def is_going(generation: Generation | Request) -> bool:
    """Whether the request is in flight and was not aborted."""
    return is_in_flight(generation) and session_of(generation).phase in GOING


def is_undecided(generation: Generation | Request) -> bool:
    """Whether an abort would end the request: it has no outcome, and was not aborted."""
    return record(generation).outcome is None and (is_going(generation) or not is_in_flight(generation))


def is_aborted(generation: Generation | Request) -> bool:
    """Whether an abort, or the end of its session, has stopped the request, with or without an outcome."""
    outcome = record(generation).outcome
    is_stopping = is_in_flight(generation) and outcome is None and session_of(generation).phase in STOPPING
    return is_stopping or (outcome is not None and outcome.cause is not None)


def has_id(generation: Generation | Request) -> bool:
    """Whether the request was admitted and has its id."""
    return record(generation).id is not None


def is_settled(generation: Generation | Request) -> bool:
    """Whether the worker has finished with the request and its slot is free."""
    return _readable(generation).settled.is_set()


def is_timed_out(generation: Generation | Request) -> bool:
    """Whether the request's timeout has ended it."""
    return _readable(generation).is_timed_out


def has_unread(generation: Generation | Request) -> bool:
    """Whether there is a chunk that its reader has not read."""
    return _readable(generation).has_unread


def num_tokens(generation: Generation | Request) -> int:
    """Tokens of the answer that were received."""
    return record(generation).num_tokens


def deadline(generation: Generation | Request) -> float:
    """The time at which the request's timeout passes."""
    return record(generation).deadline.at


# ---- the worker -----------------------------------------------------------------------------------------------------


def sequence_of(worker: SimulatedWorker, session: int) -> Sequence | None:
    """The sequence of a session that the worker holds."""
    held = worker.core._sessions.get(session)
    return None if held is None else held.sequence


def parked(worker: SimulatedWorker) -> list[Sequence]:
    """The worker's sequences that wait for their payloads, or for their grammars."""
    waiters = worker.core._scheduler._waiters
    return [each for each in waiters.sequences if each.status is SequenceStatus.PARKED]


def is_compiling(worker: SimulatedWorker, request: int) -> bool:
    """Whether the worker has this request, and its grammar has yet to be compiled."""
    return any(each.request == request and each.is_compiling for each in parked(worker))


def known_pictures(worker: SimulatedWorker, message: AddMessage) -> list[Picture]:
    """The pictures of a request's images that the worker has already."""
    pictures = worker.core._scheduler.pictures._pictures
    return [pictures[image.digest] for image in message.images if image.digest in pictures]


# ---- taps, for `inside_payloads` and `inside_server` ---------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, mutate: Callable[[Any], Any]) -> Iterator[None]:
    """The attribute becomes `mutate(attribute)` until the end of the block."""
    original = owner.__dict__[name]
    setattr(owner, name, mutate(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def before(report: Callable[..., object]) -> Callable[[Any], Any]:
    """For `replaced`: a method that calls `report` with its arguments first."""

    def mutate(method: Any) -> Any:
        def tap(owner: Any, *args: Any, **more: Any) -> Any:
            report(owner, *args, **more)
            return method(owner, *args, **more)

        return tap

    return mutate


@contextmanager
def errors_logged(by: str, report: Callable[[Exception], None]) -> Iterator[None]:
    """Within, report the exceptions that a part of the package, as "actors", logs as errors: they are bugs."""
    handler = _ErrorHandler(by, report)
    logger = logging.getLogger("trioengine")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _ErrorHandler(logging.Handler):
    def __init__(self, by: str, report: Callable[[Exception], None]) -> None:
        super().__init__(logging.ERROR)
        self._by, self._report = by, report

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if f"/{self._by}/" in record.pathname and isinstance(error, Exception):
            self._report(error)
