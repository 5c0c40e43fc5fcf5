"""Whether an image is stored on its side: the orientation in its EXIF data (CIPA DC-008), found without decoding.

EXIF data is a TIFF directory: in JPEG's APP1 segment, PNG's chunk eXIf, and WebP's chunk EXIF. What is damaged, or
lies beyond MAX_PARTS parts of a file, counts as upright.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from trioengine.core.image import ImageFormat

MAX_PARTS = 1 << 12  # segments, chunks or directory entries
_ORIENTATION, _SHORT = 0x0112, 3
_QUARTER_TURNS = range(5, 9)
_PREFIX = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_START_OF_SCAN = 0xDA


def is_on_its_side(data: bytes | memoryview, format: ImageFormat) -> bool:
    """Whether the image has to be turned by a quarter, so that its width is the stored height."""
    try:
        exif = next(_PARTS[format](memoryview(data)), None) if format in _PARTS else None
        return exif is not None and _orientation(exif) in _QUARTER_TURNS
    except struct.error:  # it ends too early
        return False


def _orientation(exif: memoryview) -> int | None:
    """Of the first directory; None: it has none."""
    tiff = exif[len(_PREFIX) :] if exif[: len(_PREFIX)] == _PREFIX else exif
    order = _BYTE_ORDERS.get(bytes(tiff[:4]))
    if order is None:
        return None
    (directory,) = struct.unpack_from(order + "I", tiff, 4)
    (count,) = struct.unpack_from(order + "H", tiff, directory)
    for index in range(min(count, MAX_PARTS)):
        tag, kind, length, value = struct.unpack_from(order + "HHIH", tiff, directory + 2 + 12 * index)
        if tag == _ORIENTATION:
            return int(value) if (kind, length) == (_SHORT, 1) else None
    return None


def _in_jpeg(data: memoryview) -> Iterator[memoryview]:
    at = 2
    for _ in range(MAX_PARTS):
        mark, marker, length = struct.unpack_from(">BBH", data, at)
        if mark != 0xFF or marker == _START_OF_SCAN:
            return
        if marker == 0xE1 and data[at + 4 : at + 10] == _PREFIX:
            yield data[at + 4 : at + 2 + length]
        at += 2 + length


def _in_png(data: memoryview) -> Iterator[memoryview]:
    """It may lie behind the pixels."""
    at = 8
    for _ in range(MAX_PARTS):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"eXIf":
            yield data[at + 8 : at + 8 + length]
        at += 12 + length


def _in_webp(data: memoryview) -> Iterator[memoryview]:
    """It lies behind the pixels."""
    at = 12
    for _ in range(MAX_PARTS):
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            yield data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2


_PARTS = {ImageFormat.JPEG: _in_jpeg, ImageFormat.PNG: _in_png, ImageFormat.WEBP: _in_webp}
