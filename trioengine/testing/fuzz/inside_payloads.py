"""Private state of payloads, for the fuzzer, whose other modules read no private attributes of them.

Functions read their state; `PayloadEvents` has the methods that are called while a machine runs within `tapped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.images import MAX_WAIT, payload_of
from trioengine.actors.images import KeptImages as KeptImages
from trioengine.actors.images import RequestImages as RequestImages
from trioengine.actors.link import Link as Link
from trioengine.actors.payload import Payload as Payload
from trioengine.actors.payload import PayloadBudget, Reservation
from trioengine.actors.request import Request
from trioengine.actors.session import Session
from trioengine.actors.session_actor import SessionActor
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.image import Image
from trioengine.core.messages import PayloadConsumed
from trioengine.testing.fuzz import inside

MAX_PAYLOAD_WAIT = MAX_WAIT


def prompt_payloads(generation: Generation | Request) -> list[Payload]:
    """The payloads of the images in a request's prompt, once it is prepared."""
    prepared = inside.record(generation).prepared
    return [] if prepared is None else [payload_of(placed.image) for placed in prepared.images]


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
    return inside.actor(session)._held_payloads.payloads


def held_by_suspended(session: Session | SessionActor) -> list[Payload]:
    """The payloads that a session's suspended request has pinned."""
    return inside.actor(session)._suspended_images._pinned


def in_conversation(session: Session | SessionActor) -> set[Payload] | None:
    """The payloads of a session's conversation; None unless it is open and without a request."""
    state = inside.actor(session)
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


# ---- taps -----------------------------------------------------------------------------------------------------------


class PayloadEvents:
    """Base class: each method is called when something happens to a payload, and does nothing unless overridden."""

    def payload_created(self, payload: Payload) -> None:
        """Bytes were sealed."""

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
        (RequestImages, "unpin", inside.before(events.unpinned)),
        (KeptImages, "__init__", _after(events.images_kept)),
        (KeptImages, "release", inside.before(events.images_released)),
        (PayloadBudget, "reserve_now", lambda reserve: _reserve_now(events, reserve)),
        (Payload, "__init__", _after(events.payload_created)),
        (Payload, "drop", inside.before(events.payload_dropped)),
        (Link, "_hand_over", inside.before(lambda link, id, _: events.handed_over(link, id))),
        (Link, "on_consumed", inside.before(lambda link, message: _consumed(events, link, message))),
        (Link, "lose", inside.before(events.link_lost)),
    )
    with ExitStack() as stack:
        for owner, name, mutate in taps:
            stack.enter_context(inside.replaced(owner, name, mutate))
        yield


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
