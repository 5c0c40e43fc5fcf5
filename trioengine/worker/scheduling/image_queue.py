"""Sequences out of the line: until payloads and grammar have come (parked), or until their images are decoded.

Sequences are decoded for one after the other, so that decoded tiles take little memory.

The next sequence is given to the decoder when there is room for all its tiles, or when there are no others. Sequences
that wait here keep no tiles, and those that keep some never wait for one of these: so there will be room. Nothing is
begun out of turn, so that a sequence with many images is not overtaken without end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trioengine.core.errors import InvariantError
from trioengine.core.messages import ImageInput
from trioengine.worker.scheduling.images import Decode, ImageError, PayloadArrived, Picture, PictureStatus
from trioengine.worker.scheduling.pictures import Payloads, Pictures
from trioengine.worker.scheduling.sequence import Limits, Sequence, SequenceStatus

DECODED_MEMORY = 256 << 20  # bytes of decoded tiles; more only for one sequence that needs them


@dataclass(frozen=True, slots=True)
class PictureDecoded:
    """An event of the worker: the decoder is done with a picture."""

    picture: Picture
    tiles: object
    error: str | None = None  # there are no tiles


class Decoder(Protocol):
    """Decodes beside the steps, in the order of submission."""

    def submit(self, picture: Picture) -> None:
        """Decode its payload, which stays until the report: one PictureDecoded, not before this returns."""
        ...

    def cancel(self, picture: Picture) -> bool:
        """Return True if decoding had not begun: the picture is not reported."""
        ...


class NoDecoder:
    """The decoder of a model that takes no images."""

    def submit(self, picture: Picture) -> None:
        raise InvariantError(f"the model takes no images, and {picture} is to be decoded")

    def cancel(self, picture: Picture) -> bool:
        return False


def decode_picture(picture: Picture, decode: Decode) -> PictureDecoded:
    """Decode, in a decoder's thread; never raises: any exception becomes the picture's error."""
    try:
        if picture.payload is None:
            raise InvariantError(f"{picture} has no payload")
        with picture.payload.source.open() as data:
            tiles, num_tiles = decode(data, picture.info)
    except ImageError as exc:
        return PictureDecoded(picture, None, str(exc))
    except Exception as exc:
        return PictureDecoded(picture, None, f"{type(exc).__name__}: {exc}")
    if num_tiles != picture.num_tiles:
        return PictureDecoded(picture, None, f"the image has {num_tiles} tiles, and {picture.num_tiles} in the prompt")
    return PictureDecoded(picture, tiles)


class _Entry(NamedTuple):
    sequence: Sequence
    needed: tuple[Picture, ...]
    status: SequenceStatus  # when it left the line


class DecodeQueue:
    """Sequences in order of arrival; only pictures of the first may be at the decoder."""

    def __init__(self, pictures: Pictures, decoder: Decoder) -> None:
        self._pictures = pictures
        self._decoder = decoder
        self._entries: deque[_Entry] = deque()
        self._has_begun = False  # with the first one

    @property
    def sequences(self) -> list[Sequence]:
        return [entry.sequence for entry in self._entries]

    def add(self, sequence: Sequence, needed: tuple[Picture, ...]) -> None:
        """The sequence has left the line until these have tiles or features."""
        self._pictures.stop_reading(sequence)
        self._entries.append(_Entry(sequence, needed, sequence.status))
        sequence.status = SequenceStatus.DECODING

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended; the decoder finishes the picture that it has begun."""
        entry = next(entry for entry in self._entries if entry.sequence is sequence)
        if self._has_begun and entry is self._entries[0]:
            self._has_begun = False
            self._pictures.stop_reading(sequence)
            for picture in entry.needed:
                if picture.status is PictureStatus.DECODING and self._decoder.cancel(picture):
                    self._pictures.cancel_decoding(picture)
        self._entries.remove(entry)

    def take_in(self, decoded: PictureDecoded) -> Sequence | None:
        """The sequence, still in the queue, whose image could not be decoded; others have to try for themselves."""
        picture = decoded.picture
        if decoded.error is None:
            self._pictures.finish_decoding(picture, decoded.tiles)
            return None
        is_read = picture.num_readers > 0
        self._pictures.cancel_decoding(picture)
        return self._entries[0].sequence if is_read else None

    def advance(self) -> list[Sequence]:
        """Submit pictures as far as there is room; return the sequences that are ready, in their former states."""
        done: list[Sequence] = []
        while self._entries and (self._has_begun or self._begin(self._entries[0])):
            sequence, needed, status = self._entries[0]
            if any(picture.status is PictureStatus.DECODING for picture in needed):
                break
            self._entries.popleft()
            self._has_begun = False
            sequence.status = status
            done.append(sequence)
        return done

    def check_integrity(self) -> None:
        """Raise InvariantError unless the first sequence alone has pictures at the decoder, and waits for them."""
        for entry in self._entries:
            has_begun = self._has_begun and entry is self._entries[0]
            if entry.sequence.status is not SequenceStatus.DECODING or (entry.sequence.reading and not has_begun):
                raise InvariantError(f"request {entry.sequence.request} is {entry.sequence.status.value}, and decoding")

    def _begin(self, entry: _Entry) -> bool:
        """Submit its pictures; False if its tiles do not fit into memory."""
        pictures = self._pictures
        to_decode = [picture for picture in entry.needed if picture.status is PictureStatus.HELD]
        before, more = pictures.decoded_bytes, sum(map(pictures.decoded_bytes_of, to_decode))
        if before and more and before + more > DECODED_MEMORY:
            return False
        self._has_begun = True
        pictures.read(entry.sequence, entry.needed)
        for picture in to_decode:
            pictures.begin_decoding(picture)
            self._decoder.submit(picture)
        return True


class Waiters:
    """Sequences out of the line, and all payloads and pictures. The sequences that a method returns join the line."""

    def __init__(self, limits: Limits, decoder: Decoder) -> None:
        self.payloads = Payloads()
        self.pictures = Pictures(self.payloads, limits.tile, limits.encoder_cache_memory)
        self._parked: list[Sequence] = []
        self._decodes = DecodeQueue(self.pictures, decoder)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self._parked, *self._decodes.sequences]

    def add(self, sequence: Sequence) -> list[Sequence]:
        """A new sequence: it is parked, or returned."""
        if sequence.images is not None:
            self.pictures.use(sequence.images.pictures)
        self._parked.append(sequence)
        sequence.status = SequenceStatus.PARKED
        return self.unpark()

    def announce(self, images: tuple[ImageInput, ...]) -> list[Sequence]:
        """The payloads of these are on their way, or here already."""
        for image in images:
            payload = self.payloads.announce(image)
            if payload is not None:
                self.pictures.give(image.digest, payload)
        return self.unpark()

    def take_payload(self, arrived: PayloadArrived) -> list[Sequence]:
        known = self.payloads.arrive(arrived.payload, arrived.source)
        if known is None:
            return []
        image, payload = known
        self.pictures.give(image.digest, payload)
        return self.unpark()

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
            is_parked = sequence.status is SequenceStatus.PARKED
            if is_parked is not _is_expecting(sequence):
                raise InvariantError(f"request {sequence.request} is {sequence.status.value}: {sequence.images}")
        self._decodes.check_integrity()
        self.pictures.check_integrity(sequences)

    def unpark(self) -> list[Sequence]:
        """The sequences that need not wait any more."""
        ready = [sequence for sequence in self._parked if not _is_expecting(sequence)]
        for sequence in ready:
            self._parked.remove(sequence)
            sequence.status = SequenceStatus.WAITING
        return ready


def _is_expecting(sequence: Sequence) -> bool:
    """Whether its grammar is not there, or of one of its images neither bytes nor features."""
    return sequence.is_compiling or (
        sequence.images is not None
        and any(picture.status is PictureStatus.EXPECTED for picture in sequence.images.pictures)
    )
