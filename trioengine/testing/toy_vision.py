"""What the toy model sees: for each token of an image a hash of the image's bytes, so that a wrong image shows."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from trioengine.core.image import ImageInfo
from trioengine.core.image_processing import ImageProcessing
from trioengine.worker.scheduling.images import DecodedImage, ImageError, TileShape

ToyImage: TypeAlias = tuple[Iterable[int], bytes]  # where its tiles begin in a prompt, and its bytes

TOY_TILE = TileShape(num_tokens=3, decoded_bytes=64 << 20, feature_bytes=1 << 20)
TOY_TILE_EDGE = 8  # pixels
UNREADABLE = b"\xff"  # bytes that begin with it cannot be decoded


@dataclass(frozen=True, slots=True)
class ToyProcessing(ImageProcessing):
    """Images are not scaled, and there is no whole image beside their tiles."""

    def num_tiles(self, width: int, height: int) -> int:
        return -(-width // self.tile_size) * -(-height // self.tile_size)

    def prompt_text(self, width: int, height: int) -> str:
        tile = "[" + self.image_token * self.tokens_per_tile
        return tile * self.num_tiles(width, height) + "]"


TOY_PROCESSING = ToyProcessing(
    image_token="<image>",
    image_token_id=259,
    tokens_per_tile=TOY_TILE.num_tokens,
    tile_size=TOY_TILE_EDGE,
    longest_edge=TOY_TILE_EDGE,
    splits=True,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)


class ToyPicture:
    """A picture of one repeated byte, with those methods of a PIL image that are needed to send it."""

    mode = "RGB"

    def __init__(self, width: int, height: int, value: int = 0) -> None:
        self.size = (width, height)
        self._value = value

    @property
    def data(self) -> bytes:
        """What the worker gets; with the value 255 it cannot be decoded."""
        width, height = self.size
        return bytes([self._value]) * (width * height * 3)

    def convert(self, mode: str) -> ToyPicture:
        return self

    def crop(self, box: tuple[int, int, int, int]) -> ToyPicture:
        left, top, right, bottom = box
        return ToyPicture(right - left, bottom - top, self._value)

    def tobytes(self) -> bytes:
        return self.data


class DamagedPicture(ToyPicture):
    """As a PIL image whose file ends too early, which Pillow finds when the pixels are read."""

    def crop(self, box: tuple[int, int, int, int]) -> ToyPicture:
        raise OSError("image file is truncated (0 bytes not processed)")


def toy_file(width: int, height: int, value: int = 0) -> bytes:
    """An image file, as large as the pixels of such a ToyPicture; with the value 255, too, it cannot be decoded."""
    header = _jpeg_header(width, height) if value == UNREADABLE[0] else _png_header(width, height)
    return header.ljust(width * height * 3, bytes([value]))


def _png_header(width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))


def _jpeg_header(width: int, height: int) -> bytes:
    """It begins with the byte 255, as every JPEG does."""
    frame = struct.pack(">BHHB", 8, height, width, 1) + bytes.fromhex("011100")
    return bytes.fromhex("ffd8 ffc0") + struct.pack(">H", 2 + len(frame)) + frame + bytes.fromhex("ffda")


def toy_num_tiles(info: ImageInfo) -> int:
    """How many tiles an image has."""
    return TOY_PROCESSING.num_tiles(info.width, info.height)


def toy_decode(data: memoryview, info: ImageInfo) -> DecodedImage:
    """A tile is a hash of the bytes and of its number."""
    if bytes(data[:1]) == UNREADABLE:
        raise ImageError("the toy model cannot read it")
    tiles = [toy_tile(bytes(data), number) for number in range(toy_num_tiles(info))]
    return DecodedImage(tiles, len(tiles))


def toy_tile(data: bytes, number: int) -> int:
    """The pixels of a tile."""
    return zlib.crc32(data, number)


def toy_features(tile: int, num_tokens: int, weights: int) -> list[int]:
    """What takes the place of the token ids of a tile; it depends on the weights, as real features do."""
    return [zlib.crc32(b"%d %d" % (weights, offset), tile) for offset in range(num_tokens)]


def toy_embeddings(images: Iterable[ToyImage], num_tokens: int, weights: int) -> dict[int, int]:
    """The reference: what stands for the token ids of a prompt, by position."""
    found: dict[int, int] = {}
    for positions, data in images:
        for number, position in enumerate(positions):
            found.update(enumerate(toy_features(toy_tile(data, number), num_tokens, weights), position))
    return found
