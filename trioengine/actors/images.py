"""The images of a request: found in the prompt, admitted as payloads, put back, and kept while they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from types import TracebackType
from typing import Any, Self, TypeVar

import trio

from trioengine.actors.media import ImageSource, Media, SealedImage, seal_images, source_of, source_of_url
from trioengine.actors.observer import Observer
from trioengine.actors.payload import Payload, PayloadBudget, Reservation
from trioengine.actors.ports import Ports
from trioengine.actors.waiting_line import waits_for
from trioengine.aio.concurrency import NEVER, Deadline
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineOverloaded, RequestRejected
from trioengine.core.image import MAX_IMAGE_BYTES, Image, image_url, is_image_part
from trioengine.core.messages import ImageInput
from trioengine.core.types import token_ids
from trioengine.text.chat_tokenizer import PlacedImage, image_parts

MAX_WAIT = 60.0  # seconds for room in the budget, whatever the request's own timeout


class ImageStore:
    """The images of one engine: room for them, and the means to copy them out of this process's memory."""

    def __init__(self, config: EngineConfig, ports: Ports, observers: Sequence[Observer] = ()) -> None:
        self.budget = PayloadBudget(config.payload_memory, ports.max_payloads(), observers)
        self.max_bytes = min(config.payload_memory, MAX_IMAGE_BYTES)  # of one image
        self.copying = trio.Semaphore(1)  # images are copied one request after the other: the cores are for answers
        self.secret = ports.mint_secret()  # keys the digests of images
        self.ports = ports


class RequestImages:
    """The images of one request, pinned until `unpin`."""

    __slots__ = ("__weakref__", "_deadline", "_pinned", "_store", "_wait")

    def __init__(self, store: ImageStore, *, wait: bool | None = False, deadline: Deadline = NEVER) -> None:
        self._store = store
        self._wait = wait
        self._deadline = deadline
        self._pinned: list[Payload] = []

    async def admit(self, sources: Sequence[ImageSource]) -> list[Payload]:
        """Make payloads of these images, pinned.

        Raises RequestRejected for bytes that are not an image, or more than the whole budget, EngineOverloaded without
        room within MAX_WAIT seconds, TimedOut at the request's deadline. Cancelled, nothing is left of them.
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
        with self._making(self._store.budget.reserve_now(size, len(sources))) as reservation:
            return self._make(reservation, sources, seal_images(sources, self._store.ports.seal, self._store.secret))

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
        store = self._store
        with trio.move_on_at(self._deadline.at):
            async with store.copying:
                images: list[SealedImage] = await store.ports.finish_in_thread(
                    seal_images, sources, store.ports.seal, store.secret
                )
                return images
        raise self._deadline.passed("while waiting: images of other requests are copied")

    async def _reserve(self, num_bytes: int, count: int) -> Reservation:
        budget = self._store.budget
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
        budget, reservations = self._store.budget, []

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


class HeldPayloads:
    """The payloads that a session holds for its images. Held ones are kept while there is room for them."""

    __slots__ = ("payloads",)

    def __init__(self) -> None:
        self.payloads: tuple[Payload, ...] = ()

    def replace(self, images: Iterable[Image]) -> None:
        """Hold the payloads of these images, and no others."""
        before, self.payloads = self.payloads, tuple(dict.fromkeys(map(payload_of, images)))
        for payload in self.payloads:
            payload.hold()
        for payload in before:
            payload.release()


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


T = TypeVar("T")
_URL_FIELDS = {"image_url": "image_url.url", "input_image": "image_url"}  # by the part's type
_PLAIN = (str, bytes, bytearray, memoryview)  # sequences, but not of messages or of parts


def take_images(
    prompt: Any, media: Sequence[Media] = (), *, max_bytes: int, where: str = "prompt"
) -> tuple[Any, list[ImageSource]]:
    """The prompt with a source in the place of each image that has no payload yet, and these sources.

    `media` go before the text of the last message. `max_bytes` bounds each image of a client. Raises RequestRejected
    for values that cannot be images.
    """
    if not isinstance(media, Sequence) or isinstance(media, _PLAIN):
        raise RequestRejected("invalid_value", f"media must be a list, got {type(media).__name__}", param="media")
    if media:
        prompt = _with_media(prompt, [{"type": "image", "image": image} for image in media])
    sources: list[ImageSource] = []

    def take(part: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        source = _source_of(part, max_bytes, where)
        if source is None:
            return part
        sources.append(source)
        return {"type": "image", "image": source}

    return _mapped(prompt, where, take), sources


def put_images(prompt: Any, payloads: Sequence[Payload]) -> Any:
    """The prompt of `take_images`, with an image part for each payload in the place of its source."""
    rest = iter(payloads)

    def put(part: Mapping[str, Any], _: str) -> Mapping[str, Any]:
        if not isinstance(part.get("image"), ImageSource):
            return part
        payload = next(rest)
        return Image(payload.info, payload).part

    return _mapped(prompt, "", put) if payloads else prompt


def _mapped(prompt: Any, where: str, change: Callable[[Mapping[str, Any], str], Mapping[str, Any]]) -> Any:
    """The prompt with every part of a message's content changed; itself where no content has parts."""
    if isinstance(prompt, _PLAIN) or not isinstance(prompt, Sequence):
        return prompt
    changed: dict[int, Mapping[str, Any]] = {}
    for index, message in enumerate(prompt):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, _PLAIN):
            parts = [
                change(part, f"{where}[{index}].content[{number}]") if isinstance(part, Mapping) else part
                for number, part in enumerate(content)
            ]
            changed[index] = {**message, "content": parts}
    return [changed.get(index, message) for index, message in enumerate(prompt)] if changed else prompt


def _source_of(part: Mapping[str, Any], max_bytes: int, where: str) -> ImageSource | None:
    if is_image_part(part):
        return None
    if part.get("type") == "image" and "image" in part:
        return source_of(part["image"], where)
    url = image_url(part, where)
    return None if url is None else source_of_url(url, max_bytes, f"{where}.{_URL_FIELDS[part['type']]}")


def _with_media(prompt: Any, images: list[dict[str, Any]]) -> list[Any]:
    """The prompt as messages, the last of which begins with these images."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, _PLAIN) and prompt
    if not is_chat or not isinstance(prompt[-1], Mapping):
        raise RequestRejected("invalid_value", "media: images need a text or chat messages as prompt", param="media")
    *others, last = prompt
    content = last.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(content, _PLAIN) or not isinstance(content, Sequence):
        return list(prompt)  # it will be refused for this content
    return [*others, {**last, "content": [*images, *content]}]


class KeptImages:
    """Chat messages, and a hold on the images in them; leaving its `with` block, or `release`, gives that back.

    Held images are kept as long as there is room for them, and a request whose image was dropped is refused.
    """

    __slots__ = ("_payloads", "messages")

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises RequestRejected for an Image that no engine has made."""
        self.messages = messages
        found = image_parts(message for message in messages if isinstance(message, Mapping))
        self._payloads = [payload_of(part.image) for part in found]
        for payload in self._payloads:
            payload.hold()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Hold them no more; harmless when they were released."""
        payloads, self._payloads = self._payloads, []
        for payload in payloads:
            payload.release()
