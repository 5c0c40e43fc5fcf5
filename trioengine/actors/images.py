"""The images of a request on its way in: room for them, their payloads, and pins until the link has its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

import trio

from trioengine.actors.media import ImageSource, SealedImage, seal_images
from trioengine.actors.payload import Payload, Reservation
from trioengine.actors.waiting_line import waits_for
from trioengine.aio.deadline import NEVER, Deadline
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.image import Image
from trioengine.core.messages import ImageInput
from trioengine.core.types import token_ids
from trioengine.text.chat_tokenizer import PlacedImage

if TYPE_CHECKING:
    from trioengine.actors.engine_state import EngineState

MAX_WAIT = 60.0  # seconds for room in the budget, whatever the request's own timeout


class RequestImages:
    """The images of one request, pinned until `unpin`."""

    __slots__ = ("__weakref__", "_deadline", "_engine", "_pinned", "_wait")

    def __init__(self, engine: EngineState, *, wait: bool | None = False, deadline: Deadline = NEVER) -> None:
        self._engine = engine
        self._wait = wait
        self._deadline = deadline
        self._pinned: list[Payload] = []

    async def admit(self, sources: Sequence[ImageSource]) -> list[Payload]:
        """Make payloads of these images, pinned.

        Raises RequestRejected for bytes that are not an image, or more than the whole budget, EngineOverloaded if there
        is no room within MAX_WAIT seconds, TimedOut at the request's deadline. Cancelled, nothing is left of them.
        """
        if not sources:
            return []
        size = sum(source.num_bytes for source in sources)
        with self._making(await self._reserve(size, len(sources))) as reservation:
            return self._make(reservation, sources, await self._seal(sources))

    def admit_now(self, sources: Sequence[ImageSource]) -> list[Payload]:
        """As `admit`, but in this step: it blocks for some 3 ms for each 10 MB, and waits for no room."""
        if not sources:
            return []
        size = sum(source.num_bytes for source in sources)
        with self._making(self._engine.payloads.reserve_now(size, len(sources))) as reservation:
            return self._make(reservation, sources, seal_images(sources, self._engine.ports.seal, self._engine.secret))

    @contextmanager
    def _making(self, reservation: Reservation) -> Iterator[Reservation]:
        """Give back the rest of a reservation when the block, which makes payloads of it, is left."""
        try:
            yield reservation
        except OSError as exc:
            raise EngineOverloaded(f"no memory for an image: {exc}", code="payloads") from exc
        finally:
            reservation.give_back()

    def _make(
        self, reservation: Reservation, sources: Sequence[ImageSource], images: Sequence[SealedImage]
    ) -> list[Payload]:
        payloads = [reservation.make(*image, source.num_bytes) for image, source in zip(images, sources, strict=True)]
        self._pinned += payloads
        return payloads

    def pin(self, images: Iterable[PlacedImage]) -> None:
        """Pin a prompt's payloads. Raises RequestRejected, naming the part, if one was dropped."""
        images = tuple(images)
        if (dropped := find_dropped(images)) is not None:
            raise dropped
        for placed in images:
            payload = payload_of(placed.image)
            payload.pin()
            self._pinned.append(payload)

    def unpin(self) -> None:
        """Give the pins back: the request is committed, and its link has pins of its own; or it is refused."""
        while self._pinned:
            self._pinned.pop().unpin()

    async def _seal(self, sources: Sequence[ImageSource]) -> list[SealedImage]:
        """Copy the images in turn. Raises TimedOut if the deadline passes before that begins."""
        engine = self._engine
        with trio.move_on_at(self._deadline.at):
            async with engine.sealing:
                images: list[SealedImage] = await engine.ports.finish_in_thread(
                    seal_images, sources, engine.ports.seal, engine.secret
                )
                return images
        raise self._deadline.passed("while waiting: images of other requests are copied")

    async def _reserve(self, num_bytes: int, count: int) -> Reservation:
        budget = self._engine.payloads
        try:
            return budget.reserve_now(num_bytes, count)
        except EngineOverloaded as exc:
            if not waits_for(exc, self._wait):
                raise
        if (reservation := await self._wait_for_room(num_bytes, count)) is not None:
            return reservation
        try:
            return budget.reserve_now(num_bytes, count)  # too late: raises the reason as it is now
        except EngineOverloaded as exc:
            if trio.current_time() < self._deadline.at:
                raise
            raise self._deadline.passed(f"while waiting: {exc}") from exc

    async def _wait_for_room(self, num_bytes: int, count: int) -> Reservation | None:
        """Return None if it is too late. A waiter that leaves without room may have left some for those behind."""
        budget, reservations = self._engine.payloads, []

        def reserve() -> None:
            reservations.append(budget.reserve(num_bytes, count))

        try:
            with trio.move_on_at(min(self._deadline.at, trio.current_time() + MAX_WAIT)):
                await budget.line.wait(reserve, wait=self._wait)
        finally:
            if not reservations:
                budget.line.serve()
        return reservations[0] if reservations else None


def payload_of(image: Image) -> Payload:
    """The payload that an image refers to; RequestRejected for an Image that no engine has made."""
    if not isinstance(image.handle, Payload):
        raise RequestRejected("invalid_value", "messages: an Image comes from a session's history", param="messages")
    return image.handle


def find_dropped(images: Iterable[PlacedImage]) -> RequestRejected | None:
    """The error, which names the part, of the first image that was dropped; None if all are there."""
    placed = next((each for each in images if payload_of(each.image).is_dropped), None)
    if placed is None:
        return None
    problem = "the image is not kept any more, because others needed the room; send it again"
    return RequestRejected.at(placed.name, "image_dropped", problem)


def image_inputs(images: Iterable[PlacedImage], cache_salt: str, mint: Callable[[], int]) -> tuple[ImageInput, ...]:
    """The images as ADD_MESSAGE announces them, each with a payload id of its own."""
    return tuple(_image_input(placed, payload_of(placed.image), cache_salt, mint()) for placed in images)


def _image_input(placed: PlacedImage, payload: Payload, cache_salt: str, payload_id: int) -> ImageInput:
    return ImageInput(
        payload=payload_id,
        name=placed.name,
        digest=blake2b(cache_salt.encode(), digest_size=32, key=payload.digest).digest(),
        info=payload.info,
        num_bytes=payload.num_bytes,
        tiles=token_ids(span.start for span in placed.spans),
    )
