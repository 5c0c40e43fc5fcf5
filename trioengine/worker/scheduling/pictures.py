"""Pictures: the images of prompts by their content, from bytes to the features that stand for them in a step.

The bytes are payloads, from the ADD_MESSAGE that announces them to PAYLOAD_CONSUMED. They travel beside the frames, so
a payload may come before its announcement is handled. Each is consumed once: its source is closed, and it is reported.

A picture is shared by all sequences that have it. It keeps its payload until each of its tiles has features, because a
tile that the prefix cache covers now may have to be computed later; or until no sequence uses it. Decoded tiles are
kept only for sequences that are about to compute them (its readers), features for all sequences that use it.

The encoder cache keeps complete pictures that no sequence uses, up to its limit in bytes; the one that was unused for
the longest time is evicted first. Sequences take from it no more than as many bytes again: a request that waits keeps
its features, and there may be many such requests. A picture that does not fit is decoded and encoded again in its turn.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from hashlib import shake_256

from trioengine.core.errors import InvariantError, RemoteProtocolError
from trioengine.core.messages import ImageInput, PayloadConsumed
from trioengine.worker.scheduling.images import Payload, PayloadSource, Picture, PictureStatus, Tile, TileShape
from trioengine.worker.scheduling.sequence import Sequence

_FIRST_TOKEN_ID = -(1 << 63)  # all ids are below -(1 << 62), so none fits into 4 bytes


def image_token_ids(digest: bytes, count: int) -> array[int]:
    """Ids, negative, for the tokens of an image with this digest: 62 bits of its hash each."""
    ids = array("q", shake_256(digest).digest(8 * count))
    return array("q", [_FIRST_TOKEN_ID | (value & (1 << 62) - 1) for value in ids])


class Pictures:
    """All pictures that sequences use, and the encoder cache."""

    def __init__(self, payloads: Payloads, tile: TileShape | None, cache_memory: int) -> None:
        self.num_queries = 0  # images looked up
        self.num_hits = 0  # complete ones
        self._payloads = payloads
        self._tile = tile
        self._cache_memory = cache_memory
        self._pictures: dict[bytes, Picture] = {}  # by digest
        self._unused: dict[bytes, None] = {}  # complete, the oldest first

    @property
    def cached_bytes(self) -> int:
        """Of the features that no sequence uses."""
        return sum(self._feature_bytes(self._pictures[digest]) for digest in self._unused)

    @property
    def used_bytes(self) -> int:
        """Of the complete features that sequences use."""
        pictures = self._pictures.values()
        return sum(self._feature_bytes(picture) for picture in pictures if picture.is_complete and picture.num_users)

    @property
    def decoded_bytes(self) -> int:
        """Of all decoded tiles, those in the making included."""
        statuses = (PictureStatus.DECODING, PictureStatus.DECODED)
        return sum(self.decoded_bytes_of(picture) for picture in self._pictures.values() if picture.status in statuses)

    def decoded_bytes_of(self, picture: Picture) -> int:
        return 0 if self._tile is None else picture.num_tiles * self._tile.decoded_bytes

    def find(self, images: Iterable[ImageInput]) -> tuple[Picture, ...]:
        """The picture of each image; new ones, which `use` makes known, for those that are not here.

        RemoteProtocolError: images have the same digest, and differ.
        """
        found: dict[bytes, Picture] = {}
        pictures = []
        for image in images:
            picture = self._pictures.get(image.digest) or found.get(image.digest) or self._new(image)
            found[image.digest] = picture
            if (picture.info, picture.num_bytes, picture.num_tiles) != (image.info, image.num_bytes, len(image.tiles)):
                raise RemoteProtocolError(f"ADD_MESSAGE: {image.name} differs from an image with the same digest")
            pictures.append(picture)
        return tuple(pictures)

    def use(self, pictures: Iterable[Picture]) -> None:
        """Count a sequence as their user until `release`."""
        for picture in pictures:
            self._pictures[picture.digest] = picture
            if picture.digest in self._unused:
                self._take_from_cache(picture)
            picture.num_users += 1
            self.num_queries += 1
            self.num_hits += picture.is_complete

    def give(self, digest: bytes, payload: Payload) -> None:
        """A payload has come; it is consumed at once where the picture needs none."""
        picture = self._pictures.get(digest)
        if picture is None or picture.status is not PictureStatus.EXPECTED:
            self._payloads.consume(payload)
        else:
            picture.payload, picture.status = payload, PictureStatus.HELD

    def release(self, sequence: Sequence, pictures: Iterable[Picture], *, discard: bool = False) -> None:
        """A sequence has ended. With `discard` its features are not cached, unless others use them: they may be wrong.

        A picture that is being decoded goes when the decoder has reported it.
        """
        self.stop_reading(sequence)
        for picture in pictures:
            picture.num_users -= 1
            if picture.num_users == 0:
                self._retire(picture, discard=discard)
        self._evict()

    # ---- decoding and encoding --------------------------------------------------------------------------------------

    def read(self, sequence: Sequence, pictures: tuple[Picture, ...]) -> None:
        """Keep the tiles of these, and of no others, for a sequence that is about to compute them."""
        before, sequence.reading = sequence.reading, pictures
        for picture in pictures:
            picture.num_readers += 1
        for picture in before:
            picture.num_readers -= 1
            self._drop_tiles(picture)

    def stop_reading(self, sequence: Sequence) -> None:
        """Release the tiles of a sequence that has computed them, or will not for a while."""
        self.read(sequence, ())

    def begin_decoding(self, picture: Picture) -> None:
        picture.status = PictureStatus.DECODING

    def cancel_decoding(self, picture: Picture) -> None:
        """Return a picture that was not, or could not be, decoded to HELD."""
        picture.status = PictureStatus.HELD
        if picture.num_users == 0:
            self._retire(picture)

    def finish_decoding(self, picture: Picture, tiles: object) -> None:
        """The tiles are kept if they are still wanted."""
        picture.tiles, picture.status = tiles, PictureStatus.DECODED
        self._drop_tiles(picture)
        if picture.num_users == 0:
            self._retire(picture)

    def take_in(self, encoded: tuple[Tile, ...]) -> None:
        """These tiles have got their features; a picture is complete with its last one."""
        for tile in encoded:
            if not tile.is_encoded:
                raise InvariantError(f"the runner has not encoded tile {tile.number} of {tile.picture}")
        for picture in {tile.picture: None for tile in encoded}:
            if picture.payload is not None and None not in picture.features:
                self._payloads.consume(picture.payload)
                picture.payload, picture.tiles, picture.status = None, None, PictureStatus.COMPLETE

    def forget_all(self) -> None:
        """Drop all features. Raises InvariantError while a sequence uses a picture."""
        if any(picture.num_users for picture in self._pictures.values()):
            raise InvariantError("images are in use, and all is to be forgotten")
        for digest in self._unused:
            del self._pictures[digest]
        self._unused.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise InvariantError unless the accounts agree with `sequences`: all there are."""
        users: Counter[Picture] = Counter()
        readers: Counter[Picture] = Counter()
        for sequence in sequences:
            users.update(sequence.images.pictures if sequence.images is not None else ())
            readers.update(sequence.reading)
        pictures = self._pictures.values()
        for picture in {*pictures, *users, *readers}:
            if self._pictures.get(picture.digest) is not picture:
                raise InvariantError(f"{picture} is used, and not known")
            if (picture.num_users, picture.num_readers) != (users[picture], readers[picture]):
                raise InvariantError(f"{picture} counts {picture.num_users} users and {picture.num_readers} readers")
            self._check(picture)
        if self.cached_bytes > self._cache_memory:
            raise InvariantError(f"the encoder cache holds {self.cached_bytes} bytes, of {self._cache_memory}")
        self._payloads.check_integrity([picture.payload.id for picture in pictures if picture.payload is not None])

    # ---- one picture ------------------------------------------------------------------------------------------------

    def _check(self, picture: Picture) -> None:
        status = picture.status
        has_payload = status not in (PictureStatus.EXPECTED, PictureStatus.COMPLETE)
        if has_payload is (picture.payload is None) or (status is PictureStatus.DECODED) is (picture.tiles is None):
            raise InvariantError(f"{picture} has {picture.payload} and {type(picture.tiles).__name__}")
        if picture.is_complete is (None in picture.features):
            raise InvariantError(f"{picture} has features of other tiles than it should")
        if status is PictureStatus.DECODED and picture.num_readers == 0:
            raise InvariantError(f"{picture} has tiles, and no reader")
        is_unused = picture.is_complete and picture.num_users == 0
        if is_unused is not (picture.digest in self._unused):
            raise InvariantError(f"{picture} has {picture.num_users} users, and the encoder cache disagrees")
        if picture.num_users == 0 and not is_unused and status is not PictureStatus.DECODING:
            raise InvariantError(f"{picture} is kept for no sequence")

    def _new(self, image: ImageInput) -> Picture:
        num_tiles = len(image.tiles)
        num_tokens = 0 if self._tile is None else num_tiles * self._tile.num_tokens
        token_ids = image_token_ids(image.digest, num_tokens)
        features: list[object] = [None] * num_tiles
        return Picture(image.digest, image.info, image.num_bytes, num_tiles, token_ids, features=features)

    def _take_from_cache(self, picture: Picture) -> None:
        """Its features stay if there is room; else its payload is expected, which comes with every request."""
        del self._unused[picture.digest]
        if self.used_bytes + self._feature_bytes(picture) > self._cache_memory:
            picture.features, picture.status = [None] * picture.num_tiles, PictureStatus.EXPECTED

    def _feature_bytes(self, picture: Picture) -> int:
        return 0 if self._tile is None else picture.num_tiles * self._tile.feature_bytes

    def _drop_tiles(self, picture: Picture) -> None:
        if picture.num_readers == 0 and picture.status is PictureStatus.DECODED:
            picture.tiles, picture.status = None, PictureStatus.HELD

    def _retire(self, picture: Picture, *, discard: bool = False) -> None:
        """No sequence uses it any more."""
        if picture.status is PictureStatus.DECODING:
            return
        if picture.is_complete and not discard:
            self._unused[picture.digest] = None
            return
        if picture.payload is not None:
            self._payloads.consume(picture.payload)
            picture.payload = None
        del self._pictures[picture.digest]

    def _evict(self) -> None:
        while self.cached_bytes > self._cache_memory:
            oldest = next(iter(self._unused))
            del self._unused[oldest], self._pictures[oldest]


class Payloads:
    """All payloads that were announced or have come, and are not consumed."""

    def __init__(self) -> None:
        self._latest = 0  # the last one that was announced: they ascend
        self._awaited: dict[int, ImageInput] = {}  # announced, and not here
        self._early: dict[int, PayloadSource] = {}  # here, and not announced
        self._here: set[int] = set()  # both
        self.consumed: list[PayloadConsumed] = []  # the reports to be sent

    @property
    def outstanding(self) -> tuple[int, ...]:
        """The ids of the payloads that were announced and are not consumed, ascending."""
        return tuple(sorted(self._here.union(self._awaited)))

    @property
    def num_held(self) -> int:
        """The number of payloads that have come, announced or not."""
        return len(self._here) + len(self._early)

    def announce(self, image: ImageInput) -> Payload | None:
        """The payload, if it has come already. RemoteProtocolError: it has another length."""
        self._latest = image.payload
        self._awaited[image.payload] = image
        source = self._early.pop(image.payload, None)
        return None if source is None else self._take(image, source)

    def arrive(self, payload: int, source: PayloadSource) -> tuple[ImageInput, Payload] | None:
        """The image that a payload is of; None: its announcement is still to come.

        RemoteProtocolError, and the source is closed: the payload has come before, or has another length.
        """
        image = self._awaited.get(payload)
        if image is not None:
            return image, self._take(image, source)
        if payload <= self._latest or payload in self._early:
            source.close()
            raise RemoteProtocolError(f"payload {payload} has come already")
        self._early[payload] = source
        return None

    def consume(self, payload: Payload) -> None:
        """Close its source; `take_consumed` reports it."""
        self._here.remove(payload.id)
        payload.source.close()
        self.consumed.append(PayloadConsumed(payload.id))

    def take_consumed(self) -> list[PayloadConsumed]:
        """The reports of those that were consumed since the last call, in order."""
        consumed, self.consumed = self.consumed, []
        return consumed

    def check_integrity(self, held: list[int]) -> None:
        """Raise InvariantError unless `held` are those that were announced and are here, each once."""
        if sorted(held) != sorted(self._here):
            raise InvariantError(f"payloads {sorted(self._here)} are here, and images hold {sorted(held)}")

    def _take(self, image: ImageInput, source: PayloadSource) -> Payload:
        if source.num_bytes != image.num_bytes:
            source.close()
            raise RemoteProtocolError(
                f"payload {image.payload} has {source.num_bytes} bytes, and ADD_MESSAGE announced {image.num_bytes}"
            )
        del self._awaited[image.payload]
        self._here.add(image.payload)
        return Payload(image.payload, source)
