"""The one room from which the fuzzer looks into the engine: only this module knows its parts and private attributes.

The engine's part: functions that read state which the public API does not show. The second part, `Taps`, turns calls of
private methods into the methods of `PayloadEvents`, for as long as a machine runs; the engine's own events are in
`actors.observer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import trio

from trioengine.actors import audit
from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.images import MAX_WAIT, payload_of
from trioengine.actors.images import KeptImages as KeptImages
from trioengine.actors.images import RequestImages as RequestImages
from trioengine.actors.link import Link as Link
from trioengine.actors.payload import Payload as Payload
from trioengine.actors.payload import PayloadBudget, Reservation
from trioengine.actors.power import DO_NOT_WAKE as DO_NOT_WAKE
from trioengine.actors.power_change import PowerChange as PowerChange
from trioengine.actors.recovery import MAX_RESUMES as MAX_RESUMES
from trioengine.actors.request import Request as Request
from trioengine.actors.session import Session
from trioengine.actors.session_actor import SessionActor as SessionActor
from trioengine.actors.waiting_line import WaitingLine
from trioengine.actors.waiting_line import waits_for as waits_for
from trioengine.core.connection import Connection
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.image import Image
from trioengine.core.lifecycle import Phase, Power
from trioengine.core.messages import AddMessage, PayloadConsumed
from trioengine.core.types import Cause
from trioengine.testing.simulated_worker import SimulatedWorker
from trioengine.worker.scheduling.images import Picture
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus

MAX_PAYLOAD_WAIT = MAX_WAIT
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


def num_suspended(engine: Engine) -> int:
    """Suspended requests, by the ledger."""
    return engine.runtime.gate.ledger.suspended


def num_waiting(engine: Engine) -> int:
    """Sessions and requests in line for a slot."""
    return len(engine.runtime.gate.requests) + len(engine.runtime.gate.sessions)


def is_change_pending(engine: Engine) -> bool:
    """Whether a sleep or an update is requested and not done."""
    return engine.runtime.gate.is_change_pending


def num_retired(engine: Engine) -> int:
    """Workers that were retired so that a fresh one takes their place."""
    return engine.runtime.supervisor.retired


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


def actor(session: Session | SessionActor) -> SessionActor:
    """The actor behind a session's handle."""
    return session._state if isinstance(session, Session) else session


def record(generation: Generation | Request) -> Request:
    """The engine's record behind a request's handle."""
    if isinstance(generation, Request):
        return generation
    assert isinstance(generation._state, Request), "it is a request of an engine"
    return generation._state


def phase(session: Session | SessionActor) -> Phase:
    """The session's phase in the lifecycle table."""
    return actor(session).phase


def request_of(session: Session | SessionActor) -> Request | None:
    """The session's request in flight."""
    return actor(session).request


def end_cause(session: Session | SessionActor) -> Cause | None:
    """The cause by which the session has ended; None while it is open."""
    return session.end_cause


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


def has_id(generation: Generation | Request) -> bool:
    """Whether the request was admitted and has its id."""
    return record(generation).id is not None


def is_settled(generation: Generation | Request) -> bool:
    """Whether the worker has finished with the request and its slot is free."""
    return record(generation).settled.is_set()


def is_timed_out(generation: Generation | Request) -> bool:
    """Whether the request's timeout has ended it."""
    return record(generation).is_timed_out


def num_tokens(generation: Generation | Request) -> int:
    """Tokens of the answer that were received."""
    return record(generation).num_tokens


def deadline(generation: Generation | Request) -> float:
    """The time at which the request's timeout passes."""
    return record(generation).deadline.at


def prompt_payloads(generation: Generation | Request) -> list[Payload]:
    """The payloads of the images in a request's prompt, once it is prepared."""
    prepared = record(generation).prepared
    return [] if prepared is None else [payload_of(placed.image) for placed in prepared.images]


# ---- payloads -------------------------------------------------------------------------------------------------------


def budget(engine: Engine) -> PayloadBudget:
    """The budget of the engine's payloads."""
    return engine.runtime.images.budget


def payload(image: Image) -> Payload:
    """The payload of an image in a history."""
    return payload_of(image)


def num_pins(payload: Payload) -> int:
    return payload._num_pins


def num_holders(payload: Payload) -> int:
    return payload._num_holders


def reserved(engine: Engine) -> tuple[int, int, int]:
    """Reservations for payloads that are being made, with their bytes and descriptors."""
    reservations = engine.runtime.images.budget._reservations
    return len(reservations), sum(each.num_bytes for each in reservations), sum(each.count for each in reservations)


def held_by(session: Session | SessionActor) -> tuple[Payload, ...]:
    """The payloads that a session holds."""
    return actor(session)._held_payloads.payloads


def held_by_suspended(session: Session | SessionActor) -> list[Payload]:
    """The payloads that a session's suspended request has pinned."""
    return actor(session)._suspended_images._pinned


def in_conversation(session: Session | SessionActor) -> set[Payload] | None:
    """The payloads of a session's conversation; None unless it is open and without a request."""
    state = actor(session)
    if state.request is not None or not state.is_open or state.end_cause is not None:
        return None
    return {payload_of(image) for image in state.conversation.images}


def pinned_by(images: RequestImages) -> list[Payload]:
    """The payloads that a request on its way in has pinned."""
    return images._pinned


def kept_by(kept: KeptImages) -> list[Payload]:
    """The payloads that are held for a KeptImages."""
    return kept._payloads


def handed_over(link: Link) -> dict[int, Payload]:
    """The payloads that a link has pinned, by their ids."""
    return link._payloads


def has_unsent_payloads(engine: Engine) -> bool:
    """Whether payloads wait to be sent to the worker."""
    return engine.runtime.gate.link is not None and bool(engine.runtime.gate.link._unsent)


# ---- the worker -----------------------------------------------------------------------------------------------------


def sequence_of(worker: SimulatedWorker, session: int) -> Sequence | None:
    """The sequence of a session that the worker holds."""
    held = worker.core._sessions.get(session)
    return None if held is None else held.sequence


def parked(worker: SimulatedWorker) -> list[Sequence]:
    """The worker's sequences that wait for their payloads."""
    waiters = worker.core._scheduler._waiters
    return [each for each in waiters.sequences if each.status is SequenceStatus.WAITING_FOR_PAYLOAD]


def known_pictures(worker: SimulatedWorker, message: AddMessage) -> list[Picture]:
    """The pictures of a request's images that the worker has already."""
    pictures = worker.core._scheduler.pictures._pictures
    return [pictures[image.digest] for image in message.images if image.digest in pictures]


# ---- taps -----------------------------------------------------------------------------------------------------------


class PayloadEvents:
    """Base class: each method is called when something happens to a payload, and does nothing unless overridden."""

    def images_created(self, images: RequestImages) -> None:
        """A request, or a session, may get images."""

    def room_requested(self, images: RequestImages, num_bytes: int, count: int) -> None:
        """The current task asks for room for so many bytes and descriptors, and may wait for it."""

    def room_answered(self, images: RequestImages, error: BaseException | None, *, may_wait: bool) -> None:
        """The current task has the room that it asked for, or this error."""

    def newcomer_admitted(self, num_bytes: int) -> None:
        """Room was taken without waiting."""

    def newcomer_refused(self, num_bytes: int, count: int, error: EngineOverloaded) -> None:
        """Room is refused without waiting."""

    def sealing_failed(self, error: EngineOverloaded) -> None:
        """The system has no memory for an image."""

    def payloads_made(self, images: RequestImages) -> None:
        """The images of a request are payloads now."""

    def image_missing(self, images: RequestImages) -> None:
        """A prompt has an image that was dropped."""

    def unpinned(self, images: RequestImages) -> None:
        """A request has given its pins back."""

    def images_kept(self, kept: KeptImages) -> None:
        """Images are held beside the sessions."""

    def images_released(self, kept: KeptImages) -> None:
        """They are not any more; it may have happened before."""

    def payload_dropped(self, payload: Payload) -> None:
        """The bytes of a payload are about to be closed."""

    def link_opened(self, link: Link) -> None:
        """There is a link to a new worker."""

    def handed_over(self, link: Link, payload_id: int) -> None:
        """A payload is about to be passed to a worker."""

    def consumed(self, link: Link, payload_id: int) -> None:
        """The worker has closed a payload."""

    def link_lost(self, link: Link) -> None:
        """The worker is dead."""


@contextmanager
def tapped(events: PayloadEvents) -> Iterator[None]:
    """Within, report events of payloads."""
    taps = (
        (RequestImages, "__init__", _after(events.images_created)),
        (RequestImages, "_reserve", lambda reserve: _reserve(events, reserve)),
        (RequestImages, "_making", lambda making: _making(events, making)),
        (RequestImages, "_make", _after(events.payloads_made)),
        (RequestImages, "pin", lambda pin: _pin(events, pin)),
        (RequestImages, "unpin", before(events.unpinned)),
        (KeptImages, "__init__", _after(events.images_kept)),
        (KeptImages, "release", before(events.images_released)),
        (PayloadBudget, "reserve_now", lambda reserve: _reserve_now(events, reserve)),
        (Payload, "drop", before(events.payload_dropped)),
        (Link, "__init__", _after(events.link_opened)),
        (Link, "_hand_over", before(lambda link, id, _: events.handed_over(link, id))),
        (Link, "on_consumed", before(lambda link, message: _consumed(events, link, message))),
        (Link, "lose", before(events.link_lost)),
    )
    with ExitStack() as stack:
        for owner, name, mutate in taps:
            stack.enter_context(replaced(owner, name, mutate))
        yield


def before(report: Callable[..., object]) -> Callable[[Any], Any]:
    """For `replaced`: a method that calls `report` with its arguments first."""

    def mutate(method: Any) -> Any:
        def tap(owner: Any, *args: Any, **more: Any) -> Any:
            report(owner, *args, **more)
            return method(owner, *args, **more)

        return tap

    return mutate


def _after(report: Callable[[Any], object]) -> Callable[[Any], Any]:
    def mutate(method: Any) -> Any:
        def tap(owner: Any, *args: Any, **more: Any) -> Any:
            result = method(owner, *args, **more)
            report(owner)
            return result

        return tap

    return mutate


def _consumed(events: PayloadEvents, link: Link, message: PayloadConsumed) -> None:
    events.consumed(link, message.payload)


def _reserve(events: PayloadEvents, reserve: Any) -> Any:
    async def tap(images: RequestImages, num_bytes: int, count: int) -> Any:
        events.room_requested(images, num_bytes, count)
        error: BaseException | None = None
        try:
            return await reserve(images, num_bytes, count)
        except BaseException as exc:
            error = exc
            raise
        finally:
            events.room_answered(images, error, may_wait=images._wait is not False)

    return tap


def _making(events: PayloadEvents, making: Any) -> Any:
    @contextmanager
    def tap(images: RequestImages, reservation: Reservation) -> Iterator[Reservation]:
        try:
            with making(images, reservation):
                yield reservation
        except EngineOverloaded as exc:
            events.sealing_failed(exc)
            raise

    return tap


def _pin(events: PayloadEvents, pin: Any) -> Any:
    def tap(images: RequestImages, placed: Any) -> None:
        try:
            pin(images, placed)
        except RequestRejected:
            events.image_missing(images)
            raise

    return tap


def _reserve_now(events: PayloadEvents, reserve: Any) -> Any:
    def tap(budget: PayloadBudget, num_bytes: int, count: int) -> Any:
        try:
            reservation = reserve(budget, num_bytes, count)
        except EngineOverloaded as exc:
            events.newcomer_refused(num_bytes, count, exc)
            raise
        events.newcomer_admitted(num_bytes)
        return reservation

    return tap


@contextmanager
def replaced(owner: Any, name: str, mutate: Callable[[Any], Any]) -> Iterator[None]:
    """The attribute becomes `mutate(attribute)` until the end of the block."""
    original = owner.__dict__[name]
    setattr(owner, name, mutate(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
