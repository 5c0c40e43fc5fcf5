"""Images stored on their side: of every format, and whatever is damaged is upright."""

import base64
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.core import exif
from trioengine.core.exif import is_on_its_side
from trioengine.core.image import ImageFormat

CASES = json.loads(Path(__file__).parents[1].joinpath("data/image_modes_reference.json").read_text())
ON_THEIR_SIDE = {*(f"jpeg turned {number}" for number in range(5, 9)), "png turned 6", "webp turned 8"}


def read(name):
    return base64.b64decode(CASES[name]["data"]), ImageFormat(CASES[name]["format"])


@pytest.mark.parametrize("name", CASES)
def test_encoded_images(name):
    """As Pillow writes them, which turns the same ones by a quarter when it reads them."""
    data, format = read(name)
    assert is_on_its_side(data, format) == (name in ON_THEIR_SIDE)
    assert is_on_its_side(memoryview(data), format) == (name in ON_THEIR_SIDE)


def directory(*entries, order="<"):
    """TIFF with (tag, type, count, value)s."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    packed = b"".join(struct.pack(order + "HHIHxx", *entry) for entry in entries)
    return head + struct.pack(order + "IH", 8, len(entries)) + packed + bytes(4)


def png(*chunks):
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I4s", len(content), name) + content + bytes(4) for name, content in chunks
    )


ORIENTATION = 0x0112
TURNED = (ORIENTATION, 3, 1, 6)
DIRECTORIES = {
    "little-endian": (directory(TURNED), True),
    "big-endian": (directory(TURNED, order=">"), True),
    "behind other entries": (directory((0x010F, 2, 4, 0), (0x0110, 2, 4, 0), TURNED), True),
    "with a prefix": (b"Exif\0\0" + directory(TURNED), True),
    "upright": (directory((ORIENTATION, 3, 1, 1)), False),
    "a flip": (directory((ORIENTATION, 3, 1, 4)), False),
    "beyond eight": (directory((ORIENTATION, 3, 1, 9)), False),
    "no number": (directory((ORIENTATION, 2, 1, 6)), False),
    "two numbers": (directory((ORIENTATION, 3, 2, 6)), False),
    "no orientation": (directory((0x0110, 2, 4, 0)), False),
    "no entries": (directory(), False),
    "no directory": (b"nothing of it", False),
    "nothing": (b"", False),
    "cut short": (directory(TURNED)[:12], False),
    "a directory beyond the end": (b"II*\0" + struct.pack("<I", 2**32 - 1), False),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directories(name):
    content, expected = DIRECTORIES[name]
    assert is_on_its_side(png((b"IHDR", bytes(13)), (b"eXIf", content)), ImageFormat.PNG) is expected


def test_behind_too_many_parts():
    turned = (b"eXIf", directory(TURNED))
    for count, expected in ((exif.MAX_PARTS - 1, True), (exif.MAX_PARTS, False)):
        assert is_on_its_side(png(*[(b"IDAT", b"")] * count, turned), ImageFormat.PNG) is expected
    segment = b"\xff\xe0" + struct.pack(">H", 2)
    last = b"\xff\xe1" + struct.pack(">H", 8 + len(turned[1])) + b"Exif\0\0" + turned[1]
    chunk = b"ICCP" + struct.pack("<I", 1) + bytes(2)
    for count, expected in ((exif.MAX_PARTS - 1, True), (exif.MAX_PARTS, False)):
        assert is_on_its_side(b"\xff\xd8" + segment * count + last, ImageFormat.JPEG) is expected
        webp = b"RIFF\0\0\0\0WEBP" + chunk * count + b"EXIF" + struct.pack("<I", len(turned[1])) + turned[1]
        assert is_on_its_side(webp, ImageFormat.WEBP) is expected


@pytest.mark.parametrize("format", ImageFormat)
def test_raw_pixels_and_gifs_are_upright(format):
    assert not is_on_its_side(b"", format)
    assert not is_on_its_side(bytes(100), format)


@given(st.sampled_from(sorted(ON_THEIR_SIDE)), st.integers(0), st.binary(max_size=8))
def test_whatever_is_damaged(name, at, patch):
    data, format = read(name)
    at %= len(data)
    assert is_on_its_side(data[:at] + patch + data[at + len(patch) :], format) in (True, False)
    assert is_on_its_side(data[:at], format) in (True, False)
