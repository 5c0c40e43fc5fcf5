"""Bytes to an image in RGB, by Pillow, and to tiles, pixel for pixel as transformers' Idefics3ImageProcessorPil.

Tiles are cut by numpy alone, as torch would start a pool of threads for the thread that decodes.

An image is turned by its EXIF orientation, as transformers turns a file that it loads, and transparent pixels lie on
white, as in transformers' `convert_to_rgb`. The orientation is the one that was declared, not Pillow's: the two may
read damaged metadata differently, and the prompt has the tiles of the declared dimensions.

Decoding takes at most DECODE_SECONDS, checked whenever Pillow reads a block of the file. Between two reads it does a
bounded amount of work; the work of a whole file is unbounded: a JPEG may have 200,000 scans over all its pixels,
a PNG 20,000 color profiles of 1 MiB.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from time import thread_time

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor

from trioengine.core.image import ImageFormat, ImageInfo, ImageProcessing, Size
from trioengine.worker.scheduling.images import ImageError

PngImagePlugin.MAX_TEXT_MEMORY = 16 << 20  # bytes of compressed texts, which nothing here reads
Image.MAX_IMAGE_PIXELS = None  # an image is as large as its ImageInfo, which was bounded before
warnings.filterwarnings("ignore", module="PIL")  # of damaged metadata

DECODE_SECONDS = 10  # of the thread's processor time: five times the time of the slowest image of 64 megapixels
_JPEG_BLOCK = 256  # bytes that are read at a time: at most 25 scans
_STRIP = 1 << 20  # pixels that are laid on white at a time: it takes twelve bytes for each
_WHITE = (255, 255, 255, 255)
_TURNS = {  # by orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FIRST_QUARTER_TURN = 5


def read_tiles(data: bytes | memoryview, info: ImageInfo, processing: ImageProcessing) -> Tensor:
    """Decode, resize and split an image: uint8 [num_tiles, 3, tile_size, tile_size], the whole image last.

    Raises ImageError if the bytes cannot be decoded, or are another image than `info` declares.
    """
    grid, size = processing.grid(info.width, info.height), processing.tile_size
    resample = Image.Resampling(processing.resample)
    resized = decode(data, info).resize(grid.scaled, resample).resize(grid.resized, resample)
    if grid.rows == 0:
        return torch.from_numpy(_pixels(resized, size))
    whole = resized.resize((size, size), resample)
    return torch.from_numpy(np.concatenate((_pixels(resized, size), _pixels(whole, size))))


def decode(data: bytes | memoryview, info: ImageInfo) -> Image.Image:
    """The image in RGB, of the declared dimensions; of a GIF, its first frame. Raises ImageError.

    It takes four bytes of memory a pixel, and as many for a while where the image is turned or is not stored in RGB; a
    progressive JPEG at most twelve, a WebP seventeen.
    """
    declared = (info.width, info.height)
    if info.format is ImageFormat.RGB:
        return _raw(data, declared)
    stored = declared[::-1] if info.orientation >= _FIRST_QUARTER_TURN else declared
    name = _name(info)
    with _any_exception_as(f"the image is not a {name} image, or is truncated or damaged"):
        image = Image.open(_TimedFile(data, name), formats=[info.format.name])
    _check_size(image.size, stored)  # before its pixels take memory
    if info.format is ImageFormat.JPEG:
        image.decodermaxblock = _JPEG_BLOCK
    with _any_exception_as(f"the {name} image is truncated or damaged"):
        image.load()
        converted = _in_rgb(image)
        turned = converted.transpose(_TURNS[info.orientation]) if info.orientation in _TURNS else converted
    _check_size(turned.size, declared)
    return turned


def _raw(data: bytes | memoryview, size: Size) -> Image.Image:
    width, height = size
    expected = width * height * 3
    if len(data) != expected:
        raise ImageError(f"an RGB image of {width} x {height} pixels has {expected} bytes, got {len(data)}")
    return Image.frombytes("RGB", size, data)


class _TimedFile(BytesIO):
    """A file whose `read` raises ImageError once the thread has computed for DECODE_SECONDS."""

    def __init__(self, data: bytes | memoryview, name: str) -> None:
        super().__init__(data)
        self._name = name
        self._deadline = thread_time() + DECODE_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        if thread_time() > self._deadline:
            raise ImageError(f"the {self._name} image takes more than {DECODE_SECONDS} s to decode")
        return super().read(size)


@contextmanager
def _any_exception_as(message: str) -> Iterator[None]:
    """Raise ImageError instead: decoders raise anything for a damaged file."""
    try:
        yield
    except ImageError:
        raise
    except Exception as exc:
        raise ImageError(message) from exc


def _check_size(found: Size, declared: Size) -> None:
    if found != declared:
        raise ImageError(f"the image has {found[0]} x {found[1]} pixels, not {declared[0]} x {declared[1]} as declared")


def _name(info: ImageInfo) -> str:
    return "WebP" if info.format is ImageFormat.WEBP else info.format.name


def _in_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """A strip at a time: whole copies in RGBA would take twelve bytes a pixel."""
    width, height = image.size
    result = Image.new("RGB", image.size)
    rows = max(1, _STRIP // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, _WHITE)
        result.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return result


def _pixels(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """The tiles of an image that is whole tiles, row by row: [num_tiles, 3, size, size]."""
    pixels = np.asarray(image)  # [height, width, 3]
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    tiles = pixels.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tiles.reshape(-1, 3, size, size))
