"""Sequences that are out of the line for their images: until their payloads have come, or until they are decoded."""

from __future__ import annotations

from trioengine.core.errors import InvariantError
from trioengine.core.messages import ImageInput
from trioengine.worker.scheduling.decode_queue import DecodeQueue, Decoder, PictureDecoded
from trioengine.worker.scheduling.limits import Limits
from trioengine.worker.scheduling.payloads import PayloadArrived, Payloads
from trioengine.worker.scheduling.pictures import Picture, Pictures, PictureStatus
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus


class ImageWaiters:
    """Their sequences, payloads and pictures. The sequences that a method returns join the line."""

    def __init__(self, limits: Limits, decoder: Decoder) -> None:
        self.payloads = Payloads()
        self.pictures = Pictures(self.payloads, limits.tile, limits.encoder_cache_memory)
        self._parked: list[Sequence] = []  # for payloads
        self._decodes = DecodeQueue(self.pictures, decoder)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self._parked, *self._decodes.sequences]

    def add(self, sequence: Sequence) -> list[Sequence]:
        """A new sequence: it is parked, or returned."""
        if sequence.images is not None:
            self.pictures.use(sequence.images.pictures)
        self._parked.append(sequence)
        sequence.status = SequenceStatus.WAITING_FOR_PAYLOAD
        return self._unpark()

    def announce(self, images: tuple[ImageInput, ...]) -> list[Sequence]:
        """The payloads of these are on their way, or here already."""
        for image in images:
            payload = self.payloads.announce(image)
            if payload is not None:
                self.pictures.give(image.digest, payload)
        return self._unpark()

    def take_payload(self, arrived: PayloadArrived) -> list[Sequence]:
        known = self.payloads.arrive(arrived.payload, arrived.source)
        if known is None:
            return []
        image, payload = known
        self.pictures.give(image.digest, payload)
        return self._unpark()

    def take_decoded(self, decoded: PictureDecoded) -> Sequence | None:
        """The sequence that cannot go on, still here: see `DecodeQueue.take_in`. Others may, by `advance`."""
        return self._decodes.take_in(decoded)

    def decode(self, sequence: Sequence, needed: tuple[Picture, ...]) -> list[Sequence]:
        """The sequence has left the line until these have tiles or features."""
        self._decodes.add(sequence, needed)
        return self._decodes.advance()

    def advance(self) -> list[Sequence]:
        """Whenever pictures have come, or have gone."""
        return self._decodes.advance()

    def remove(self, sequence: Sequence) -> None:
        """A sequence that is here has ended."""
        if sequence.status is SequenceStatus.DECODING:
            self._decodes.remove(sequence)
        else:
            self._parked.remove(sequence)

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise InvariantError unless the books agree with `sequences`: all there are, in the line and out of it."""
        for sequence in sequences:
            is_parked = sequence.status is SequenceStatus.WAITING_FOR_PAYLOAD
            if is_parked is not _is_expecting(sequence):
                raise InvariantError(f"request {sequence.request} is {sequence.status.value}: {sequence.images}")
        self._decodes.check_integrity()
        self.pictures.check_integrity(sequences)

    def _unpark(self) -> list[Sequence]:
        ready = [sequence for sequence in self._parked if not _is_expecting(sequence)]
        for sequence in ready:
            self._parked.remove(sequence)
            sequence.status = SequenceStatus.WAITING
        return ready


def _is_expecting(sequence: Sequence) -> bool:
    """Whether there are neither bytes nor features of one of its images."""
    return sequence.images is not None and any(
        picture.status is PictureStatus.EXPECTED for picture in sequence.images.pictures
    )
