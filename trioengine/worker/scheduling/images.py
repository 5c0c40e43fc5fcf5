"""Images as data: payloads, pictures, their tiles, and the places of the tiles among a prompt's tokens."""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from trioengine.core.errors import RequestRejected
from trioengine.core.image import ImageInfo
from trioengine.core.messages import ImageInput


@dataclass(frozen=True, slots=True)
class TileShape:
    """The sizes of each tile of an image. Raises ValueError unless all are at least 1."""

    num_tokens: int  # of a prompt, consecutive: one for each row of the tile's features
    decoded_bytes: int  # of its pixels, as they are given to the encoder
    feature_bytes: int  # of all its features

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.decoded_bytes, self.feature_bytes) < 1:
            raise ValueError(f"a tile must have tokens, pixels and features, got {self}")


class DecodedImage(NamedTuple):
    """The tiles of an image, as the model runner takes them, and how many there are."""

    tiles: object
    num_tiles: int


Decode: TypeAlias = Callable[[memoryview, ImageInfo], DecodedImage]  # or ImageError


class ImageError(Exception):
    """An image cannot be decoded, or differs from its declaration; the message is a sentence for the client."""


@dataclass(frozen=True, slots=True)
class Vision:
    """How a model sees images."""

    tile: TileShape
    decode: Decode  # called in the decoder's thread; the tiles refer to nothing of the bytes that it was given


class PayloadSource(Protocol):
    """The bytes of a payload; a real one is a descriptor."""

    @property
    def num_bytes(self) -> int: ...

    def open(self) -> AbstractContextManager[memoryview]:
        """The bytes, read only, while the context lasts. In any thread, before `close`."""
        ...

    def close(self) -> None:
        """Give the bytes back; once."""
        ...


@dataclass(frozen=True, slots=True)
class PayloadArrived:
    """An event of the worker: a payload has come."""

    payload: int
    source: PayloadSource


class Payload(NamedTuple):
    """A payload that was announced, and has come."""

    id: int
    source: PayloadSource


class PictureStatus(enum.Enum):
    """How far a picture has come."""

    EXPECTED = "expected"  # its payload has not come
    HELD = "held"  # its payload is here, and is not decoded
    DECODING = "decoding"  # the decoder reads the payload
    DECODED = "decoded"  # tiles are also here, because a sequence is about to compute them
    COMPLETE = "complete"  # only the features are left, of every tile


@dataclass(slots=True, eq=False)
class Picture:
    """One image; owned and changed by `Pictures`, but for `features`, which the model runner sets."""

    digest: bytes
    info: ImageInfo
    num_bytes: int
    num_tiles: int
    token_ids: array[int]  # for the prefix cache, see `image_token_ids`: of one tile after the other
    status: PictureStatus = PictureStatus.EXPECTED
    payload: Payload | None = None
    tiles: object = None  # as the runner's `decode` made them
    features: list[object] = field(default_factory=list)  # of each tile, opaque; None: not encoded
    num_users: int = 0  # places in the prompts of sequences that live
    num_readers: int = 0  # sequences that the tiles are kept for

    @property
    def is_complete(self) -> bool:
        return self.status is PictureStatus.COMPLETE

    def __repr__(self) -> str:
        return f"<picture {self.digest.hex()[:8]}, {self.status.value}>"


class Tile(NamedTuple):
    """A tile of a picture."""

    picture: Picture
    number: int  # in the order of the image's tokens

    @property
    def is_encoded(self) -> bool:
        return self.picture.features[self.number] is not None


class TilePiece(NamedTuple):
    """Consecutive tokens of one tile: they take rows `start` to `stop` of the tile's features."""

    tile: Tile
    start: int
    stop: int
    offset: int  # of the first of these tokens, among the tokens that were asked for


class PromptImages:
    """Fixed for the life of a sequence; made by `place_images`."""

    def __init__(self, images: tuple[ImageInput, ...], pictures: tuple[Picture, ...], tile: TileShape) -> None:
        self.pictures = pictures  # one an image: the same one twice, where images are the same
        self._names = {picture: image.name for picture, image in zip(pictures, images, strict=True)}
        self._positions = [position for image in images for position in image.tiles]  # of first tokens, ascending
        self._tiles = [Tile(picture, number) for picture in pictures for number in range(picture.num_tiles)]
        self._tile_size = tile.num_tokens

    def name(self, picture: Picture) -> str:
        """The place of an image in the request, for error messages."""
        return self._names[picture]

    def pieces(self, start: int, end: int) -> list[TilePiece]:
        """The parts of tiles that lie from token `start` to `end`, in order."""
        size = self._tile_size
        found: list[TilePiece] = []
        for index in range(bisect_right(self._positions, start - size), len(self._positions)):
            position = self._positions[index]
            if position >= end:
                break
            first, stop = max(position, start), min(position + size, end)
            found.append(TilePiece(self._tiles[index], first - position, stop - position, first - start))
        return found

    def not_encoded(self, start: int) -> tuple[Picture, ...]:
        """The pictures with tiles that have no features and a token at `start` or behind it, each once."""
        first = bisect_right(self._positions, start - self._tile_size)
        return tuple({tile.picture: None for tile in self._tiles[first:] if not tile.is_encoded})

    def content(self, token_ids: list[int], start: int, end: int) -> list[int]:
        """These tokens, with the images' own ids in their places."""
        ids = token_ids[start:end]
        for (picture, number), first, stop, offset in self.pieces(start, end):
            before = number * self._tile_size
            ids[offset : offset + stop - first] = picture.token_ids[before + first : before + stop]
        return ids


def place_images(
    images: tuple[ImageInput, ...], pictures: tuple[Picture, ...], num_tokens: int, tile: TileShape | None
) -> PromptImages | None:
    """The images of a prompt of that many tokens; None where it has none.

    Raises RequestRejected unless the tiles lie within the prompt, ascending, and none on another.
    """
    if not images:
        return None
    if tile is None:
        raise RequestRejected("invalid_value", f"{images[0].name}: the model takes no images")
    end = 0
    for image in images:
        if not image.tiles:
            raise RequestRejected("invalid_value", f"{image.name}: the image has no tiles")
        for position in image.tiles:
            if position < end:
                raise RequestRejected("invalid_value", f"{image.name}: a tile begins at token {position}, before {end}")
            end = position + tile.num_tokens
    if end > num_tokens:
        raise RequestRejected("invalid_value", f"a tile ends at token {end}, and the prompt has {num_tokens}")
    return PromptImages(images, pictures, tile)
