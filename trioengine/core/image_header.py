"""The format and the dimensions of an encoded image, read from its header alone.

Nothing is decoded or copied, and at most MAX_SEGMENTS parts of a file are read, so that the cost is bounded for every
file. Formats: PNG (W3C), JPEG (ITU T.81), GIF89a (CompuServe), WebP (RFC 9649). Pillow is left to the worker: its
WebP reader allocates the canvas when a file is opened.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from trioengine.core.errors import RequestRejected
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.wording import brief

MAX_PIXELS = 1 << 26  # 192 MiB as RGB
MAX_WEBP_PIXELS = 12 << 20  # 4096 x 3072; its decoder allocates all of them before it reads the data
MAX_SIDE = 1 << 14  # the usual limit of libraries and GPU textures; WebP's own limit is one less
MAX_SEGMENTS = 1 << 12  # of metadata before the image itself; enough for an ICC profile of 1 MB in a GIF
FORMAT_NAMES = {ImageFormat.PNG: "PNG", ImageFormat.JPEG: "JPEG", ImageFormat.WEBP: "WebP", ImageFormat.GIF: "GIF"}
MEDIA_TYPES = {
    "image/png": ImageFormat.PNG,
    "image/jpeg": ImageFormat.JPEG,
    "image/jpg": ImageFormat.JPEG,  # no registered type, but widely used
    "image/webp": ImageFormat.WEBP,
    "image/gif": ImageFormat.GIF,
}
Size: TypeAlias = tuple[int, int]  # width, height
_FIRST_QUARTER_TURN = 5  # of the orientations
Chunk: TypeAlias = tuple[bytes, memoryview]  # a name of four letters, and the content


class _BadHeader(Exception):
    """The header breaks the rules of its format; the message completes `the PNG image …`."""


def read_header(data: bytes | memoryview, *, media_type: str | None = None, where: str = "image") -> ImageInfo:
    """Return the image's format, and its width and height in pixels as shown: turned by its EXIF orientation.

    An animation has the size of its canvas. Raises RequestRejected, whose message begins with `where`, for other
    formats, for headers that are damaged or contradict themselves, for more than MAX_PIXELS pixels (MAX_WEBP_PIXELS of
    a WebP image) or MAX_SIDE in a row or column, and for data that is not of the `media_type` that was declared for it.
    """
    format = _format_of(data, where)
    if media_type is not None:
        _check_media_type(media_type, format, where)
    try:
        shown = _READERS[format](memoryview(data))
    except _BadHeader as exc:
        raise RequestRejected.at(where, "image_parse_error", f"the {FORMAT_NAMES[format]} image {exc}") from None
    check_size(shown.width, shown.height, where, format)
    return ImageInfo(format, *shown)


def _format_of(data: bytes | memoryview, where: str) -> ImageFormat:
    head = bytes(data[:12])
    for format, is_format in _SIGNATURES.items():
        if is_format(head):
            return format
    problem = "not a PNG, JPEG, WebP or GIF image" if head else "the image is empty"
    raise RequestRejected.at(where, "invalid_image_format", problem)


def _check_media_type(media_type: str, format: ImageFormat, where: str) -> None:
    if media_type not in MEDIA_TYPES:
        problem = f"the media type must be image/png, image/jpeg, image/webp or image/gif, got {brief(media_type)}"
        raise RequestRejected.at(where, "unsupported_image_media_type", problem)
    if MEDIA_TYPES[media_type] is not format:
        problem = f"declared {media_type}, but the data is a {FORMAT_NAMES[format]} image"
        raise RequestRejected.at(where, "invalid_image_format", problem)


def check_size(width: int, height: int, where: str, format: ImageFormat = ImageFormat.RGB) -> None:
    """Raise RequestRejected, naming `where`, for an image without pixels or with too many for its format."""
    shown = f"the image is {width} x {height} pixels"
    if not width or not height:
        raise RequestRejected.at(where, "image_parse_error", shown)
    is_webp = format is ImageFormat.WEBP
    if width * height > (most := MAX_WEBP_PIXELS if is_webp else MAX_PIXELS):
        kind = " of a WebP image" if is_webp else ""
        raise RequestRejected.at(where, "image_too_large", f"{shown}; at most {most} pixels{kind} are accepted")
    if max(width, height) > MAX_SIDE:
        raise RequestRejected.at(where, "image_too_large", f"{shown}; at most {MAX_SIDE} pixels a side are accepted")


def _unpack(layout: str, data: memoryview, at: int = 0) -> tuple[Any, ...]:
    try:
        return struct.unpack_from(layout, data, at)
    except struct.error:
        raise _BadHeader("is truncated") from None


# ---- EXIF: a directory of TIFF (CIPA DC-008) ------------------------------------------------------------------------

_EXIF_PREFIX = b"Exif\0\0"  # of EXIF data in a JPEG segment; elsewhere it may be there
MAX_EXIF_ENTRIES = 1 << 10  # of the directory, that are looked at
_TIFF_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_ORIENTATION = 0x0112
_EXIF_INTEGERS = {3: "H", 4: "I"}  # by a value's type
_UPRIGHT = 1
_ORIENTATIONS = range(1, 9)


def _orientation_of(exif: bytes | memoryview) -> int:
    """Return the turn from the stored to the shown pixels, 1 to 8. Damaged data counts as upright."""
    tiff = exif[len(_EXIF_PREFIX) :] if exif[: len(_EXIF_PREFIX)] == _EXIF_PREFIX else exif
    order = _TIFF_BYTE_ORDERS.get(bytes(tiff[:4]), "")
    try:
        orientation = _stored_orientation(tiff, order) if order else _UPRIGHT
    except struct.error:
        return _UPRIGHT
    return orientation if orientation in _ORIENTATIONS else _UPRIGHT


def _stored_orientation(tiff: bytes | memoryview, order: str) -> int:
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    for at in range(start + 2, start + 2 + 12 * min(count, MAX_EXIF_ENTRIES), 12):
        tag, kind = struct.unpack_from(f"{order}HH", tiff, at)
        if tag == _ORIENTATION and kind in _EXIF_INTEGERS:
            value: int = struct.unpack_from(order + _EXIF_INTEGERS[kind], tiff, at + 8)[0]
            return value
    return _UPRIGHT


class _Shown(NamedTuple):
    """The size of an image as shown, and the turn from its stored pixels."""

    width: int
    height: int
    orientation: int = _UPRIGHT


def _shown(size: Size, exif: memoryview | None) -> _Shown:
    orientation = _UPRIGHT if exif is None else _orientation_of(exif)
    return _Shown(*(size[::-1] if orientation >= _FIRST_QUARTER_TURN else size), orientation)


def _exif_chunk(chunks: Iterable[Chunk], name: bytes) -> memoryview | None:
    """Return the content of the first chunk of this name; None if the data ends before one."""
    try:
        return next((content for kind, content in chunks if kind == name), None)
    except _BadHeader:
        return None


# ---- PNG ----------------------------------------------------------------------------------------------------------


def _png(data: memoryview) -> _Shown:
    length, kind, width, height = _unpack(">I4sII", data, 8)
    if length != 13 or kind != b"IHDR":
        raise _BadHeader("does not begin with a header of 13 bytes")
    (checksum,) = _unpack(">I", data, 29)
    if crc32(data[12:29]) != checksum:
        raise _BadHeader("has a header whose checksum is wrong")
    return _shown((width, height), _exif_chunk(_png_chunks(data), b"eXIf"))


def _png_chunks(data: memoryview) -> Iterator[Chunk]:
    at = 8
    for _ in range(MAX_SEGMENTS):
        length, kind = _unpack(">I4s", data, at)
        yield kind, data[at + 8 : at + 8 + length]
        at += 12 + length


# ---- JPEG ---------------------------------------------------------------------------------------------------------

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_END, _START_OF_SCAN, _EXIF_SEGMENT, _FILL = 0xD9, 0xDA, 0xE1, 0xFF


def _jpeg(data: memoryview) -> _Shown:
    """Read the size in the frame header, which must be the only one before the first scan."""
    size = exif = None
    for marker, content in _jpeg_segments(data):
        if marker == _EXIF_SEGMENT and exif is None and content[: len(_EXIF_PREFIX)] == _EXIF_PREFIX:
            exif = content
        elif marker in _START_OF_FRAME and size is not None:
            raise _BadHeader("has two frame headers")
        elif marker in _START_OF_FRAME:
            size = _jpeg_frame(content)
    if size is None:
        raise _BadHeader("has no frame header")
    return _shown(size, exif)


def _jpeg_segments(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the markers before the first scan, and the contents of their segments."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        mark, marker = _unpack("BB", data, at)
        if mark != 0xFF:
            raise _BadHeader("has bytes between its segments")
        if marker in (_END, _START_OF_SCAN):
            return
        if marker == _FILL:
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        else:
            (length,) = _unpack(">H", data, at + 2)
            content = data[at + 4 : at + 2 + length]
            if len(content) < length - 2:
                raise _BadHeader("is truncated")
            yield marker, content
            at += 2 + length
    raise _BadHeader(f"has more than {MAX_SEGMENTS} segments before its first scan")


def _jpeg_frame(content: memoryview) -> Size:
    height, width, num_components = _unpack(">xHHB", content)
    if len(content) != 6 + 3 * num_components:
        raise _BadHeader("has a frame header of a wrong length")
    return width, height


# ---- GIF ----------------------------------------------------------------------------------------------------------

_EXTENSION, _FRAME = 0x21, 0x2C


def _gif(data: memoryview) -> _Shown:
    """Read the screen's size, extended to the first frame as decoders do."""
    width, height, flags = _unpack("<HHB", data, 6)
    at, left = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0), MAX_SEGMENTS  # behind the table of colours
    while (kind := _unpack("B", data, at)[0]) == _EXTENSION:
        at, left = _behind_extension(data, at + 2, left)
    if kind != _FRAME:
        raise _BadHeader("has no frame")
    x, y, frame_width, frame_height = _unpack("<HHHH", data, at + 1)
    if not frame_width or not frame_height:
        raise _BadHeader("has an empty frame")
    return _Shown(max(width, x + frame_width), max(height, y + frame_height))


def _behind_extension(data: memoryview, at: int, left: int) -> tuple[int, int]:
    """Return the position behind the blocks at `at`, which an empty one ends, and how many more may follow."""
    for remaining in range(left - 1, -1, -1):
        (length,) = _unpack("B", data, at)
        at += 1 + length
        if not length:
            return at, remaining
    raise _BadHeader(f"has more than {MAX_SEGMENTS} blocks before its first frame")


# ---- WebP ---------------------------------------------------------------------------------------------------------

_ANIMATED, _HAS_EXIF = 0x02, 0x08


def _webp(data: memoryview) -> _Shown:
    chunks = _webp_chunks(data)
    kind, content = next(chunks)
    if kind in _FRAMES:
        return _Shown(*_FRAMES[kind](content))
    if kind != b"VP8X":
        raise _BadHeader("begins with a chunk of an unknown kind")
    flags, *canvas = _unpack("<B3x6B", content)
    size = _uint24(canvas[:3]) + 1, _uint24(canvas[3:]) + 1
    _check_frame(*_first_frame(chunks), size, is_animated=bool(flags & _ANIMATED))
    return _shown(size, _exif_chunk(_webp_chunks(data), b"EXIF") if flags & _HAS_EXIF else None)


def _webp_chunks(data: memoryview) -> Iterator[Chunk]:
    at = 12
    for _ in range(MAX_SEGMENTS):
        kind, length = _unpack("<4sI", data, at)
        yield kind, data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2


def _first_frame(chunks: Iterable[Chunk]) -> Chunk:
    for kind, content in chunks:
        if kind in _FRAMES or kind == b"ANMF":
            return kind, content
    raise _BadHeader(f"has more than {MAX_SEGMENTS} chunks before its first frame")


def _check_frame(kind: bytes, content: memoryview, canvas: Size, *, is_animated: bool) -> None:
    """Check that an image fills the canvas, or that the first frame of an animation lies within it."""
    if is_animated != (kind == b"ANMF"):
        raise _BadHeader("is an animation and an image at once")
    left, upper, width, height = _animation_frame(content) if is_animated else (0, 0, *_FRAMES[kind](content))
    fits = left + width <= canvas[0] and upper + height <= canvas[1]
    if not fits or (not is_animated and (width, height) != canvas):
        raise _BadHeader(f"has a canvas of {canvas[0]} x {canvas[1]} pixels, which its frame does not fit")


def _animation_frame(content: memoryview) -> tuple[int, int, int, int]:
    fields = _unpack("12B", content)
    x, y, width, height = (_uint24(fields[start : start + 3]) for start in range(0, 12, 3))
    return 2 * x, 2 * y, width + 1, height + 1


def _lossy_frame(content: memoryview) -> Size:
    tag, start, width, height = _unpack("<B2x3sHH", content)
    if tag & 1 or start != b"\x9d\x01\x2a":
        raise _BadHeader("does not begin with a key frame")
    return width & 0x3FFF, height & 0x3FFF  # the other bits are for scaling, by the one who shows it


def _lossless_frame(content: memoryview) -> Size:
    signature, bits = _unpack("<BI", content)
    if signature != 0x2F or bits >> 29:
        raise _BadHeader("has an unknown version")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


def _uint24(data: Sequence[int]) -> int:
    return data[0] | data[1] << 8 | data[2] << 16


_FRAMES: dict[bytes, Callable[[memoryview], Size]] = {b"VP8 ": _lossy_frame, b"VP8L": _lossless_frame}
_SIGNATURES: dict[ImageFormat, Callable[[bytes], bool]] = {  # of the first twelve bytes
    ImageFormat.PNG: lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"),
    ImageFormat.JPEG: lambda head: head.startswith(b"\xff\xd8\xff"),
    ImageFormat.GIF: lambda head: head.startswith((b"GIF87a", b"GIF89a")),
    ImageFormat.WEBP: lambda head: head.startswith(b"RIFF") and head[8:] == b"WEBP",
}
_READERS: dict[ImageFormat, Callable[[memoryview], _Shown]] = {
    ImageFormat.PNG: _png,
    ImageFormat.JPEG: _jpeg,
    ImageFormat.GIF: _gif,
    ImageFormat.WEBP: _webp,
}
