"""The orientation in an image's EXIF data: a directory of TIFF (CIPA DC-008)."""

from __future__ import annotations

import struct

PREFIX = b"Exif\0\0"  # of EXIF data in a JPEG segment; elsewhere it may be there
MAX_ENTRIES = 1 << 10  # of the directory, that are looked at
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_ORIENTATION = 0x0112
_INTEGERS = {3: "H", 4: "I"}  # by a value's type
_TURNED = range(5, 9)


def swaps_sides(exif: bytes | memoryview) -> bool:
    """Whether the image is shown turned by a quarter, so that its width is its height. Damaged data turns nothing."""
    tiff = exif[len(PREFIX) :] if exif[: len(PREFIX)] == PREFIX else exif
    order = _BYTE_ORDERS.get(bytes(tiff[:4]), "")
    try:
        return bool(order) and _orientation(tiff, order) in _TURNED
    except struct.error:
        return False


def _orientation(tiff: bytes | memoryview, order: str) -> int:
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    for at in range(start + 2, start + 2 + 12 * min(count, MAX_ENTRIES), 12):
        tag, kind = struct.unpack_from(f"{order}HH", tiff, at)
        if tag == _ORIENTATION and kind in _INTEGERS:
            value: int = struct.unpack_from(order + _INTEGERS[kind], tiff, at + 8)[0]
            return value
    return 1
