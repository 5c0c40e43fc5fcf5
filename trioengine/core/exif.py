"""The orientation in an image's EXIF data: a directory of TIFF (CIPA DC-008)."""

from __future__ import annotations

import struct

PREFIX = b"Exif\0\0"  # of EXIF data in a JPEG segment; elsewhere it may be there
MAX_ENTRIES = 1 << 10  # of the directory, that are looked at
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_ORIENTATION = 0x0112
_INTEGERS = {3: "H", 4: "I"}  # by a value's type
UPRIGHT = 1
_ORIENTATIONS = range(1, 9)


def orientation_of(exif: bytes | memoryview) -> int:
    """How the stored pixels are turned to be shown, 1 to 8. Damaged data turns nothing."""
    tiff = exif[len(PREFIX) :] if exif[: len(PREFIX)] == PREFIX else exif
    order = _BYTE_ORDERS.get(bytes(tiff[:4]), "")
    try:
        orientation = _orientation(tiff, order) if order else UPRIGHT
    except struct.error:
        return UPRIGHT
    return orientation if orientation in _ORIENTATIONS else UPRIGHT


def _orientation(tiff: bytes | memoryview, order: str) -> int:
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    for at in range(start + 2, start + 2 + 12 * min(count, MAX_ENTRIES), 12):
        tag, kind = struct.unpack_from(f"{order}HH", tiff, at)
        if tag == _ORIENTATION and kind in _INTEGERS:
            value: int = struct.unpack_from(order + _INTEGERS[kind], tiff, at + 8)[0]
            return value
    return UPRIGHT
