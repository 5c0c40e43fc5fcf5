"""Mutants of images: of payloads and their budget, and of the digests that stand for an image's content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from mutant import Mutant, replaced

from trioengine.actors import images
from trioengine.actors.images import RequestImages
from trioengine.actors.link import Link
from trioengine.actors.payload import PayloadBudget, Reservation
from trioengine.actors.session_actor import SessionActor
from trioengine.core.messages import ImageInput, PayloadConsumed
from trioengine.serve.realtime.item import Item
from trioengine.serve.realtime.response import Response
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.image_queue import DecodeQueue, PictureDecoded
from trioengine.worker.scheduling.images import Payload, PromptImages
from trioengine.worker.scheduling.pictures import Pictures
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus


def _keep_the_pin(on_consumed: Any) -> Any:
    def mutant(self: Link, message: PayloadConsumed) -> None:
        self._payloads.pop(message.payload)

    return mutant


def _release_nothing(hold_payloads: Any) -> Any:
    def mutant(self: SessionActor) -> None:
        held = self._held_payloads
        before = held.payloads
        hold_payloads(self)
        if self.request is None:  # it is over: whatever it held is held on
            gone = [payload for payload in before if payload not in held.payloads and not payload.is_dropped]
            for payload in gone:
                payload.hold()
            held.payloads = (*held.payloads, *gone)

    return mutant


def _unpin_twice(lose: Any) -> Any:
    def mutant(self: Link) -> None:
        payloads = list(self._payloads.values())
        lose(self)
        for payload in payloads:
            payload.unpin()

    return mutant


def _keep_the_reservation(making: Any) -> Any:
    @contextmanager
    def mutant(self: RequestImages, reservation: Reservation) -> Iterator[Reservation]:
        try:
            yield reservation
        except Exception:
            with making(self, reservation):
                raise
        reservation.give_back()  # a cancellation passes it by

    return mutant


def _lose_the_payloads(lose: Any) -> Any:
    def mutant(self: Link) -> None:
        self._payloads.clear()
        lose(self)

    return mutant


def _close_without_a_word(give: Any) -> Any:
    def mutant(self: Pictures, digest: bytes, payload: Payload) -> None:
        give(self, digest, payload)
        picture = self._pictures.get(digest)
        report = PayloadConsumed(payload.id)
        if picture is None and report in self._payloads.consumed:  # its request was stopped
            self._payloads.consumed.remove(report)

    return mutant


def _overlook_the_parked(end_session: Any) -> Any:
    def mutant(self: EngineCore, message: Any) -> Any:
        session = self._sessions.get(message.session)
        sequence = None if session is None else session.sequence
        if session is not None and sequence is not None and sequence.status is SequenceStatus.PARKED:
            session.sequence = None
        return end_session(self, message)

    return mutant


def _digest_the_shape(image_input: Any) -> Any:
    def mutant(placed: Any, payload: Any, cache_salt: str, payload_id: int) -> ImageInput:
        made: ImageInput = image_input(placed, payload, cache_salt, payload_id)
        shape = f"{cache_salt} {payload.info} {payload.num_bytes}".encode()
        return replace(made, digest=blake2b(shape, digest_size=32).digest())

    return mutant


def _overlook_the_content(content: Any) -> Any:
    def mutant(self: PromptImages, token_ids: list[int], start: int, end: int) -> list[int]:
        return token_ids[start:end]

    return mutant


def _without_images(resume: Any) -> Any:
    def mutant(self: SessionActor, link: Link) -> None:
        request = self._in_flight()
        prepared = request.prepared
        assert prepared is not None, "it was committed"
        payloads = [images.payload_of(placed.image) for placed in prepared.images]
        payloads = [payload for payload in payloads if not payload.is_dropped]
        for payload in payloads:
            payload.hold()
        request.prepared = replace(prepared, images=())
        resume(self, link)
        request.prepared = prepared
        self.hold_payloads()
        for payload in payloads:
            payload.release()

    return mutant


def _release_no_item(release: Any) -> Any:
    return lambda self: None


def _keep_nothing(begin: Any) -> Any:
    def mutant(self: Response) -> None:
        begin(self)
        self.release()

    return mutant


def _blame_the_first(take_in: Any) -> Any:
    def mutant(self: DecodeQueue, decoded: PictureDecoded) -> Sequence | None:
        blamed: Sequence | None = take_in(self, decoded)
        return blamed if decoded.error is None or not self.sequences else self.sequences[0]

    return mutant


def _overtake(reserve_now: Any) -> Any:
    return lambda self, num_bytes, count: self.reserve(num_bytes, count)


IMAGE_MUTANTS = (
    Mutant(
        "F22",
        "a payload that the worker has consumed is kept",
        replaced(Link, "on_consumed", _keep_the_pin),
        shows=r"counts \(\d+, \d+\) pins and holders",
    ),
    Mutant(
        "F22b",
        "the image of a turn that was taken back is kept",
        replaced(SessionActor, "hold_payloads", _release_nothing),
        shows="its conversation has|pins and holders|in the end",
    ),
    Mutant(
        "F22c",
        "the bytes of a dead worker's payloads are given back twice",
        replaced(Link, "lose", _unpin_twice),
        shows="given back once|pins and holders|what is there|is pinned, and dropped|has its bytes|conversation holds",
    ),
    Mutant(
        "F22d",
        "a request that is cancelled while its images are sealed keeps their reservation",
        replaced(RequestImages, "_making", _keep_the_reservation),
        shows=r"\d reservations, for \d requests|are in flight, for nothing",
    ),
    Mutant(
        "F22e",
        "the payloads on their way to a worker that dies are never given back",
        replaced(Link, "lose", _lose_the_payloads),
        shows=r"counts \(\d+, \d+\) pins and holders|budget._payloads has",
    ),
    Mutant(
        "F22f",
        "a payload that comes for a stopped request is closed, and never reported",
        replaced(Pictures, "give", _close_without_a_word),
        shows="the worker never consumes payloads|has yet to consume payloads|waits? forever",
    ),
    Mutant(
        "F22g",
        "the end of a session is lost by a request that waits for its payloads",
        replaced(EngineCore, "_end_session", _overlook_the_parked),
        shows="worker still runs something|blocks are|KV blocks|is there|KeyError|in flight, the worker|holds sessions"
        "|exists already|is not in flight|not the session's|it was stopped, and compiles",
    ),
    Mutant(
        "F22h",
        "the images of a conversation are kept when it is over",
        replaced(Item, "release", _release_no_item),
        shows="kept are|and kept, and waiting are|_payloads has",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F22i",
        "a response does not keep the images of its prompt",
        replaced(Response, "begin", _keep_nothing),
        shows="kept are|the image is not kept any more",
        machine="RealtimeMachine",
    ),
    Mutant(
        "F23",
        "two images of one size have the same digest",
        replaced(images, "_image_input", _digest_the_shape),
        shows="the model's",
    ),
    Mutant(
        "F23b",
        "the prefix cache takes one image for another",
        replaced(PromptImages, "content", _overlook_the_content),
        shows="the model's|an image cannot be read|with a state of something else",
    ),
    Mutant(
        "F23c",
        "a request goes on with the next worker without its images",
        replaced(SessionActor, "resume", _without_images),
        shows="the model's|of none of the weights|an image cannot be read",
        machine="PowerMachine",
    ),
    Mutant(
        "F69",
        "the error of a picture whose request was stopped fails the next one in the line for the decoder",
        replaced(DecodeQueue, "take_in", _blame_the_first),
        shows="KeyError: <picture|nothing was wrong|is refused: RequestRejected",
    ),
    Mutant(
        "F35b",
        "a small image overtakes a large one that waits for room",
        replaced(PayloadBudget, "reserve_now", _overtake),
        shows="a newcomer's .* are admitted",
    ),
)
