"""Images as the engine handles them: parts of messages, data URLs, runs of tile tokens in a prompt; never pixels."""

from __future__ import annotations

import binascii
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trioengine.core.checks import rejected
from trioengine.core.errors import RequestRejected
from trioengine.core.wording import brief

BytesLike: TypeAlias = bytes | bytearray | memoryview
VISION_MODEL = "HuggingFaceTB/SmolVLM-256M-Instruct"  # a model that takes images, for error messages
MAX_IMAGE_BYTES = 20 << 20
MAX_EDGE = 4096  # pixels: no image is scaled beyond it
Size: TypeAlias = tuple[int, int]  # width, height
_DETAILS = (None, "auto", "low", "high", "original")
_MAX_HEAD = 256  # characters of a data URL before the data
_CHUNK = 1 << 18  # characters decoded at once, a multiple of 4; other threads run in between
_PREFIX = "data:"


class ImageFormat(enum.StrEnum):
    """The format of an image's bytes. RGB: height x width x 3 bytes, without a header."""

    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"
    GIF = "gif"  # its first frame
    RGB = "rgb"


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The format and size in an image's header, read without decoding."""

    format: ImageFormat
    width: int  # pixels, as the image is shown
    height: int
    orientation: int = 1  # turn from the stored to the shown pixels, 1 to 8 as in EXIF


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image of a conversation; equal only to itself.

    A message holds it as a part of its content: `{"type": "image", "image": Image(...)}`. `handle` is opaque: the
    store of the bytes finds them by it.
    """

    info: ImageInfo
    handle: object = field(repr=False)

    @property
    def part(self) -> dict[str, Any]:
        """The image as a part of a message's content."""
        return {"type": "image", "image": self}


def is_image_part(part: object) -> bool:
    """Whether this is a part of a message's content as Image.part returns it."""
    return isinstance(part, Mapping) and part.get("type") == "image" and isinstance(part.get("image"), Image)


def image_url(part: Mapping[str, Any], where: str) -> str | None:
    """Return the URL of one of OpenAI's image parts; None for other parts.

    Chat completions have `{"type": "image_url", "image_url": {"url": …, "detail": …}}`, Realtime and Responses
    `{"type": "input_image", "image_url": …, "detail": …}`. The detail is checked, and has no effect. Raises
    RequestRejected for a part without a URL, naming the field.
    """
    if part.get("type") == "image_url":
        held, where = part.get("image_url"), f"{where}.image_url"
        if not isinstance(held, Mapping):
            raise rejected(where, f"must be an object with a url, got {brief(held)}")
        url, detail, param = held.get("url"), held.get("detail"), f"{where}.url"
    elif part.get("type") == "input_image":
        url, detail, param = part.get("image_url"), part.get("detail"), f"{where}.image_url"
    else:
        return None
    if not isinstance(url, str):
        raise rejected(param, f"must be a string, got {brief(url)}")
    if detail not in _DETAILS:
        raise rejected(f"{where}.detail", f"must be auto, low, high or original, got {brief(detail)}")
    return url


# ---- data URLs (RFC 2397) in base64: the only way in which clients send images; no URL is ever fetched ---------------


def parse_data_url(url: str, max_bytes: int, *, where: str = "image_url") -> tuple[str, bytes]:
    """Return the media type, in lower case and without parameters, and the decoded data.

    Raises RequestRejected, whose message begins with `where`, for other URLs, for data that is not exactly base64, and,
    before any of it is decoded, for more than `max_bytes`. Takes at most twice the memory of the decoded data.
    """
    if url[: len(_PREFIX)].lower() != _PREFIX:
        raise RequestRejected.at(where, "invalid_image_url", "only data: URLs are accepted; the server fetches nothing")
    comma = url.find(",", 0, _MAX_HEAD)
    media_type, *parameters = url[len(_PREFIX) : max(comma, 0)].split(";")
    if not parameters or parameters[-1].lower() != "base64":
        raise RequestRejected.at(where, "invalid_image_url", "a data: URL must begin with data:<media type>;base64,")
    start = comma + 1
    num_bytes = (len(url) - start) // 4 * 3 - url.count("=", max(len(url) - 2, start))
    if num_bytes > max_bytes:
        problem = f"the data has {num_bytes} bytes; at most {max_bytes} are accepted"
        raise RequestRejected.at(where, "image_file_too_large", problem)
    return media_type.lower(), _decoded(url, start, where)


def _decoded(url: str, start: int, where: str) -> bytes:
    end = url.find("=", start, len(url) - 2)  # only the last two characters may be padding
    if (len(url) - start) % 4 or end >= 0 or not url.isascii():
        raise _bad_base64(where)
    chunks = (url[at : at + _CHUNK] for at in range(start, len(url), _CHUNK))
    try:
        return b"".join([binascii.a2b_base64(chunk, strict_mode=True) for chunk in chunks])
    except binascii.Error:
        raise _bad_base64(where) from None


def _bad_base64(where: str) -> RequestRejected:
    return RequestRejected.at(where, "invalid_base64_image", "the data is not base64")


# ---- tiles of Idefics3 and SmolVLM models: arithmetic and text follow transformers' Idefics3ImageProcessor -----------


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """The tiles of one image, which is resized twice: `scaled` keeps its proportions, `resized` has whole tiles."""

    rows: int  # 0 x 0: the image is not split, and is one tile
    columns: int
    scaled: Size  # pixels
    resized: Size

    @property
    def num_tiles(self) -> int:
        """The number of tiles: row by row, and last the whole image as one tile."""
        return self.rows * self.columns + 1


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """A model's image settings, from config.json and preprocessor_config.json."""

    image_token: str  # marks an image in the chat template's text
    image_token_id: int
    tokens_per_tile: int
    tile_size: int  # pixels of an edge
    longest_edge: int  # pixels to which an image's longer edge is scaled
    splits: bool  # False: an image is always one tile
    mean: tuple[float, float, float]  # of a channel's values after the rescaling
    std: tuple[float, float, float]
    rescale_factor: float = 1 / 255
    resample: int = 1  # Pillow's number of a filter; 1: Lanczos
    fake_token: str = "<fake_token_around_image>"
    global_token: str = "<global-img>"

    def grid(self, width: int, height: int) -> ImageGrid:
        """Return the tiles of an image of this size in pixels, both at least 1."""
        scaled = _bounded(*_scaled(width, height, self.longest_edge))
        if not self.splits:
            return ImageGrid(0, 0, scaled, (self.tile_size, self.tile_size))
        wide, high = resized = _whole_tiles(*scaled, self.tile_size)
        if max(resized) <= self.tile_size:
            return ImageGrid(0, 0, scaled, resized)
        return ImageGrid(high // self.tile_size, wide // self.tile_size, scaled, resized)

    def num_tiles(self, width: int, height: int) -> int:
        """Return the number of tiles, which are in the order of their image tokens, the whole image last."""
        return self.grid(width, height).num_tiles

    def prompt_text(self, width: int, height: int) -> str:
        """Return the text that replaces the chat template's image token."""
        grid = self.grid(width, height)
        whole = self._tile_text(self.global_token) + self.fake_token
        if grid.rows == 0:
            return whole
        rows = (self._row_text(row, grid.columns) for row in range(1, grid.rows + 1))
        return "".join(rows) + "\n" + whole

    def _row_text(self, row: int, columns: int) -> str:
        return "".join(self._tile_text(f"<row_{row}_col_{column}>") for column in range(1, columns + 1)) + "\n"

    def _tile_text(self, place: str) -> str:
        return self.fake_token + place + self.image_token * self.tokens_per_tile


# The divisions follow transformers, in float64: another order of operations gives other sizes.


def _scaled(width: int, height: int, edge: int) -> Size:
    """Scale the longer edge to `edge`, and the other one to an even number, at least 1."""
    ratio = width / height
    if width >= height:
        other = int(edge / ratio)
        return edge, max(other + other % 2, 1)
    other = int(edge * ratio)
    return max(other + other % 2, 1), edge


def _bounded(width: int, height: int) -> Size:
    """Scale both edges to at most MAX_EDGE."""
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        return MAX_EDGE, max(int(MAX_EDGE / ratio), 1)
    if height > width and height > MAX_EDGE:
        return max(int(MAX_EDGE * ratio), 1), MAX_EDGE
    return width, height


def _whole_tiles(width: int, height: int, tile: int) -> Size:
    """Round both edges up to multiples of `tile`: the longer one first, then the other in proportion."""
    ratio = width / height
    if width >= height:
        wide = _next_multiple(width, tile)
        return wide, _next_multiple(int(wide / ratio), tile)
    high = _next_multiple(height, tile)
    return _next_multiple(int(high * ratio), tile), high  # int() may give 0: 249 * (1 / 249) is less than 1


def _next_multiple(value: int, of: int) -> int:
    return max(math.ceil(value / of), 1) * of
