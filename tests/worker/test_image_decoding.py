"""Encoded images: each mode gives transformers' pixels, and whatever is damaged an ImageError."""

import base64
import contextlib
import hashlib
import io
import itertools
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from helpers.torch_driver import reference
from hypothesis import example, given, settings
from PIL import Image

from trioengine.core.image import ImageFormat, ImageInfo, ImageProcessing
from trioengine.core.image_header import read_header
from trioengine.worker import image_decoding
from trioengine.worker.image_decoding import read_tiles
from trioengine.worker.scheduling.images import ImageError

CASES = reference("image_modes_reference.json")
HALF = (0.5, 0.5, 0.5)
PROCESSING = ImageProcessing("<image>", 7, 4, tile_size=16, longest_edge=32, splits=True, mean=HALF, std=HALF)
MESSAGES = ("truncated or damaged", "as declared")


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def read(case):
    data = base64.b64decode(case["data"])
    info = read_header(data)
    assert (info.format, [info.width, info.height]) == (case["format"], list(case["size"]))
    return data, info


def digest(tiles):
    return hashlib.sha256(tiles.numpy().tobytes()).hexdigest()


def test_tiles_are_those_of_transformers(case):
    data, info = read(case)
    assert digest(read_tiles(memoryview(data), info, PROCESSING)) == case["tiles"]


@pytest.mark.parametrize("strip", [1, 50])
def test_strips_of_any_height(monkeypatch, strip):
    """What is transparent is laid on white a strip at a time."""
    monkeypatch.setattr(image_decoding, "_STRIP", strip)
    data, info = read(CASES["png RGBA"])
    assert digest(read_tiles(data, info, PROCESSING)) == CASES["png RGBA"]["tiles"]


@pytest.mark.parametrize("name", ["jpeg turned 6", "png turned 6", "webp turned 8"])
def test_a_quarter_turn_that_was_not_declared(name):
    """The prompt has the tiles of the declared dimensions, so the image stays as it lies in the file."""
    data, info = read(CASES[name])
    image = image_decoding.decode(data, ImageInfo(info.format, info.height, info.width))
    assert image.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_raw_pixels():
    pixels = np.arange(3 * 5 * 4, dtype=np.uint8)
    image = image_decoding.decode(pixels.tobytes(), ImageInfo(ImageFormat.RGB, 5, 4))
    assert image.size == (5, 4)
    assert image.tobytes() == pixels.tobytes()
    with pytest.raises(ImageError, match=r"^an RGB image of 4 x 4 pixels has 48 bytes, got 60$"):
        image_decoding.decode(pixels.tobytes(), ImageInfo(ImageFormat.RGB, 4, 4))


def test_other_dimensions_than_declared(case):
    data, info = read(case)
    with pytest.raises(ImageError, match=r"^the image has \d\d x \d\d pixels, not 24 x 14 as declared$"):
        image_decoding.decode(data, ImageInfo(info.format, 24, 14))


def test_another_format_than_declared(case):
    data, info = read(case)
    other = ImageFormat.PNG if info.format is not ImageFormat.PNG else ImageFormat.JPEG
    message = f"^the image is not a {other.name} image, or is truncated or damaged$"
    with pytest.raises(ImageError, match=message):
        image_decoding.decode(data, ImageInfo(other, info.width, info.height))


def test_a_large_image_is_opened_without_a_warning():
    """Its size is checked against what was declared, and bounded before."""
    file = io.BytesIO()
    Image.new("1", (20000, 20000)).save(file, "PNG")
    with pytest.raises(ImageError, match="the image has 20000 x 20000 pixels, not 10 x 10 as declared"):
        image_decoding.decode(file.getvalue(), ImageInfo(ImageFormat.PNG, 10, 10))


def test_an_image_that_takes_too_long(case, monkeypatch):
    """It fails at Pillow's next read; each look at the clock takes 11 s here."""
    monkeypatch.setattr(image_decoding, "thread_time", itertools.count(step=11).__next__)
    data, info = read(case)
    name = {"webp": "WebP"}.get(info.format, info.format.upper())
    with pytest.raises(ImageError, match=f"^the {name} image takes more than 10 s to decode$"):
        image_decoding.decode(data, info)


def test_a_jpeg_is_read_in_small_blocks(monkeypatch):
    """So that the time is looked at between a few scans: a file of 20 MiB may have 200,000, of 0.04 s each."""
    looks = itertools.count(step=1e-9)
    monkeypatch.setattr(image_decoding, "thread_time", looks.__next__)
    file = io.BytesIO()
    Image.effect_noise((99, 99), 99).save(file, "JPEG", progressive=True)
    image_decoding.decode(file.getvalue(), read_header(file.getvalue()))
    assert next(looks) > 1e-9 * len(file.getvalue()) / 256


def decode(data, info):
    """The pixels, or None after an ImageError, which does not say what the decoder said."""
    try:
        return image_decoding.decode(data, info).tobytes()
    except ImageError as exc:
        found = str(exc)
    assert any(message in found for message in MESSAGES)
    return None


def test_a_truncated_image(case):
    """An ImageError at any byte, but behind the first frame of an animation."""
    data, info = read(case)
    whole = decode(data, info)
    outcomes = [decode(data[:length], info) for length in range(0, len(data), 7)]
    assert set(outcomes) <= {None, whole}
    assert outcomes[: len(outcomes) // 3] == [None] * (len(outcomes) // 3)


def damaged(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
            case 2:
                del data[at : at + rng.choice((1, 4, 30))]
            case 3:
                data[at:at] = data[at : at + rng.choice((1, 4, 30))]
    return bytes(data)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_damaged_image(case, count):
    data, info = read(case)
    rng = random.Random(count)
    for _ in range(count):
        pixels = decode(damaged(rng, data), info)
        assert pixels is None or len(pixels) == 3 * info.width * info.height


SIDEWAYS = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"  # one entry: a quarter turn


@st.composite
def exif_data(draw):
    """A quarter turn, cut or with changed bytes; or anything."""
    data = bytearray(SIDEWAYS[: draw(st.integers(0, len(SIDEWAYS)))])
    for index, value in draw(
        st.dictionaries(st.integers(0, len(SIDEWAYS) - 1), st.integers(0, 255), max_size=3)
    ).items():
        data[index : index + 1] = bytes([value]) if index < len(data) else b""
    return draw(st.sampled_from([b"", b"Exif\0\0"])) + draw(
        st.sampled_from([bytes(data), draw(st.binary(max_size=40))])
    )


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@given(exif=exif_data())
@example(exif=SIDEWAYS)
@example(exif=b"Exif\0\0garbage")
@example(exif=SIDEWAYS[:20])
@settings(deadline=None)
def test_whatever_is_in_its_metadata_an_image_is_as_declared(format, exif):
    """A turned image has the dimensions after the turn. Pillow refuses some damaged metadata of a JPEG."""
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (1, 2, 3)).save(file, format, exif=exif)
    info = read_header(file.getvalue())
    refusals = ImageError if format == "JPEG" else ()
    with contextlib.suppress(refusals):
        assert image_decoding.decode(file.getvalue(), info).size == (info.width, info.height)
