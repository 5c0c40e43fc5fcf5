"""Headers of images: those that Pillow writes and reads, and those that no encoder writes."""

import io

import pytest
from helpers import encoded_images as images
from helpers.encoded_images import encoded
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PillowImage
from PIL import ImageOps

from trioengine.core.errors import RequestRejected
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.image_header import (
    MAX_EXIF_ENTRIES,
    MAX_PIXELS,
    MAX_SEGMENTS,
    MAX_SIDE,
    MAX_WEBP_PIXELS,
    read_header,
)

REAL = {
    **{f"{format} {mode}": encoded(format, mode=mode) for format, modes in images.MODES.items() for mode in modes},
    "animated GIF": encoded("GIF", mode="L", frames=3),
    "animated WebP": encoded("WEBP", frames=3),
    "animated PNG": encoded("PNG", frames=3),
    "GIF with a comment": encoded("GIF", comment=b"c" * 600),
    "GIF87a": encoded("GIF").replace(b"GIF89a", b"GIF87a"),
    "progressive JPEG": encoded("JPEG", progressive=True),
    "JPEG with metadata": encoded("JPEG", icc_profile=bytes(100_000), comment=b"c" * 600),
    "lossless WebP": encoded("WEBP", lossless=True),
    "lossless WebP with a transparent colour": encoded("WEBP", mode="RGBA", lossless=True, exact=True),
    "WebP with metadata": encoded("WEBP", icc_profile=bytes(1001), exif=b"Exif\0\0" + bytes(99)),
    "interlaced PNG": encoded("PNG", mode="L", bits=2, optimize=True),
}


def refusal(data, **options):
    with pytest.raises(RequestRejected) as caught:
        read_header(data, **options)
    assert caught.value.param == options.get("where", "image")
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(("name", "data"), REAL.items(), ids=REAL)
def test_real_images(name, data):
    info = read_header(data)
    with PillowImage.open(io.BytesIO(data)) as image:
        assert getattr(image, "n_frames", 1) == (3 if name.startswith("animated") else 1)
        assert info == ImageInfo(ImageFormat(image.format.lower()), *image.size)
    assert read_header(memoryview(data)) == info


@pytest.mark.parametrize("format", images.MODES)
@given(st.integers(1, 300), st.integers(1, 300))
def test_dimensions_are_those_of_pillow(format, width, height):
    info = read_header(encoded(format, width, height))
    assert (info.width, info.height) == (width, height)


LARGEST = {
    "PNG": images.png(MAX_SIDE, 4096),
    "JPEG": images.jpeg(images.frame(4096, MAX_SIDE)),
    "GIF": images.gif(MAX_SIDE, 4096, images.gif_frame(1, 1)),
    "WebP": images.webp(images.lossy(0x3FFF, 768)),
    "lossless WebP": images.webp(images.lossless(768, MAX_SIDE)),
}


@pytest.mark.parametrize("data", LARGEST.values(), ids=LARGEST)
def test_the_largest_images(data):
    info = read_header(data)
    most = MAX_WEBP_PIXELS if info.format is ImageFormat.WEBP else MAX_PIXELS
    assert most - MAX_SIDE <= info.width * info.height <= most


def orientations():
    """Of each format that has EXIF data, with every orientation and some that are none."""
    for format in ("PNG", "JPEG", "WEBP"):
        for orientation in range(10):
            for order, kind in (("<", 3), (">", 3), (">", 4)):
                yield encoded(format, exif=b"Exif\0\0" + images.exif(orientation, order=order, kind=kind))
        yield encoded(format, exif=images.exif(6))
        for damaged in (b"", images.exif(6)[:12], images.exif(6)[:-7], images.exif(6, count=1)):
            yield encoded(format, exif=b"Exif\0\0" + damaged)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_images_that_are_shown_turned():
    """As Pillow turns them."""
    turned = 0
    for data in orientations():
        with PillowImage.open(io.BytesIO(data)) as image:
            size = ImageOps.exif_transpose(image).size
        info = read_header(data)
        assert (info.width, info.height) == size
        turned += size == (3, 5)
    assert turned == 3 * 12 + 2


def test_where_an_orientation_is_looked_for():
    exif, other = images.exif(6), images.exif(1)
    frame, app1 = images.frame(3, 4), b"Exif\0\0"
    for segments, width in [
        ([images.segment(0xE1, app1 + exif), frame], 4),
        ([frame, images.segment(0xE1, app1 + exif)], 4),
        ([images.segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0"), images.segment(0xE1, app1 + exif), frame], 4),
        ([images.segment(0xE1, app1 + other), images.segment(0xE1, app1 + exif), frame], 3),
        ([images.segment(0xE2, app1 + exif), frame], 3),
        ([images.segment(0xE1, exif), frame], 3),
        ([images.segment(0xE1, app1 + images.exif(6, before=[0] * MAX_EXIF_ENTRIES)), frame], 3),
        ([images.segment(0xE1, app1 + images.exif(6, before=[0] * (MAX_EXIF_ENTRIES - 1))), frame], 4),
        ([images.segment(0xE1, app1 + images.exif(6, kind=7)), frame], 3),
        ([images.segment(0xE1, app1 + b"II*\0"), frame], 3),
    ]:
        assert read_header(images.jpeg(*segments)).width == width
    still = images.lossy(3, 4)
    for flags, chunk, width in [(0, b"EXIF", 3), (8, b"EXIF", 4), (8, b"XMP ", 3)]:
        data = images.webp(images.canvas(3, 4, flags), still, images.chunk(chunk, exif), images.chunk(b"XMP ", b""))
        assert read_header(data).width == width
    png = images.png(3, 4) + images.png_chunk(b"IDAT", b"x")
    assert read_header(png + images.png_chunk(b"eXIf", exif)).width == 4
    assert read_header(png + images.png_chunk(b"IDAT", b"") * MANY + images.png_chunk(b"eXIf", exif)).width == 3
    many = images.chunk(b"XMP ", b"") * MANY
    assert read_header(images.webp(images.canvas(3, 4, 8), still, many, images.chunk(b"EXIF", exif))).width == 3


def test_whole_files_are_not_needed():
    assert read_header(images.gif(9, 0, images.gif_frame(5, 7, x=8))) == ImageInfo(ImageFormat.GIF, 13, 7)
    assert read_header(images.gif(9, 9, bytes(24), images.gif_frame(1, 1), flags=0x82)).width == 9
    assert read_header(images.jpeg(b"\xff\x01", b"\xff" * 9 + images.frame(3, 4))).height == 4
    assert read_header(images.webp(images.canvas(4, 4, 2), images.animation_frame(2, 2, 2, 2))).width == 4


TOO_LARGE = {
    "65000 x 65000": images.png(65_000, 65_000),
    "65535 x 65535": images.jpeg(images.frame(65_535, 65_535)),
    "10000 x 65535": images.gif(10_000, 10, images.gif_frame(1, 65_535)),
    "16777216 x 16777216": images.webp(images.canvas(1 << 24, 1 << 24, 2), images.animation_frame(1, 1)),
    "4096 x 3073": images.webp(images.lossless(4096, 3073)),
    "2147483647 x 2147483647": images.png(2**31 - 1, 2**31 - 1),
}


@pytest.mark.parametrize(("shown", "data"), TOO_LARGE.items(), ids=TOO_LARGE)
def test_too_many_pixels(shown, data):
    most = f"{MAX_WEBP_PIXELS} pixels of a WebP image" if data.startswith(b"RIFF") else f"{MAX_PIXELS} pixels"
    assert refusal(data) == ("image_too_large", f"image: the image is {shown} pixels; at most {most} are accepted")


def test_long_sides():
    message = f"image: the image is 100000 x 1 pixels; at most {MAX_SIDE} pixels a side are accepted"
    assert refusal(images.png(100_000, 1)) == ("image_too_large", message)
    assert refusal(images.png(1, MAX_SIDE + 1))[0] == "image_too_large"
    message = f"messages[0]: the image is 8193 x 8192 pixels; at most {MAX_PIXELS} pixels are accepted"
    assert refusal(images.png(8193, 8192), where="messages[0]") == ("image_too_large", message)


MANY = MAX_SEGMENTS + 1
FRAME = images.frame(3, 4)
BAD = {
    "PNG of no width": (images.png(0, 5), "the image is 0 x 5 pixels"),
    "JPEG of no height": (images.jpeg(images.frame(5, 0)), "the image is 5 x 0 pixels"),
    "GIF with an empty frame": (images.gif(5, 5, images.gif_frame(5, 0)), "the GIF image has an empty frame"),
    "WebP of no width": (images.webp(images.lossy(0, 5)), "the image is 0 x 5 pixels"),
    "PNG with a wrong checksum": (images.png(5, 5, error=1), "the PNG image has a header whose checksum is wrong"),
    "PNG with a long header": (images.png(5, 5, length=14), "the PNG image does not begin with a header of 13 bytes"),
    "PNG without a header": (images.png(5, 5, kind=b"IDAT"), "the PNG image does not begin with a header of 13 bytes"),
    "JPEG without a frame": (images.jpeg(), "the JPEG image has no frame header"),
    "JPEG that ends": (images.jpeg(scan=b"\xff\xd9"), "the JPEG image has no frame header"),
    "JPEG with a long frame": (images.jpeg(images.frame(3, 4, more=b"\0")), "has a frame header of a wrong length"),
    "JPEG with two frames": (images.jpeg(FRAME, FRAME), "the JPEG image has two frame headers"),
    "JPEG with junk": (images.jpeg(FRAME, b"x"), "the JPEG image has bytes between its segments"),
    "JPEG of metadata": (images.jpeg(images.segment(0xE0) * MANY), f"more than {MAX_SEGMENTS} segments"),
    "JPEG of fill bytes": (images.jpeg(b"\xff" * (1 << 20)), f"more than {MAX_SEGMENTS} segments"),
    "GIF without a frame": (images.gif(5, 5, b";"), "the GIF image has no frame"),
    "GIF of one long comment": (images.gif(5, 5, images.comment(*[b"c"] * MANY)), f"more than {MAX_SEGMENTS} blocks"),
    "GIF of many comments": (images.gif(5, 5, images.comment() * MANY), f"more than {MAX_SEGMENTS} blocks"),
    "WebP of an unknown kind": (images.webp(images.chunk(b"ALPH", b"")), "begins with a chunk of an unknown kind"),
    "WebP without a key frame": (images.webp(images.lossy(5, 5, tag=b"\1\0\0")), "does not begin with a key frame"),
    "WebP without a start code": (images.webp(images.lossy(5, 5, start=b"abc")), "does not begin with a key frame"),
    "WebP of a new version": (images.webp(images.lossless(5, 5, version=1)), "the WebP image has an unknown version"),
    "WebP of no signature": (images.webp(images.lossless(5, 5, signature=0)), "the WebP image has an unknown version"),
    "WebP of metadata": (
        images.webp(images.canvas(5, 5), images.chunk(b"ICCP", b"") * MANY),
        f"more than {MAX_SEGMENTS} chunks",
    ),
    "WebP larger than its canvas": (
        images.webp(images.canvas(5, 5), images.lossy(6, 5)),
        "the WebP image has a canvas of 5 x 5 pixels, which its frame does not fit",
    ),
    "WebP smaller than its canvas": (images.webp(images.canvas(5, 5), images.lossless(5, 4)), "does not fit"),
    "animated WebP larger than its canvas": (
        images.webp(images.canvas(5, 5, 2), images.animation_frame(4, 4, x=2)),
        "does not fit",
    ),
    "animated WebP below its canvas": (
        images.webp(images.canvas(5, 5, 2), images.animation_frame(1, 4, y=2)),
        "does not fit",
    ),
    "animated WebP without an animation": (
        images.webp(images.canvas(5, 5, 2), images.lossy(5, 5)),
        "the WebP image is an animation and an image at once",
    ),
    "WebP with an animation": (
        images.webp(images.canvas(5, 5), images.animation_frame(5, 5)),
        "the WebP image is an animation and an image at once",
    ),
}


@pytest.mark.parametrize(("data", "why"), BAD.values(), ids=BAD)
def test_lying_headers(data, why):
    code, message = refusal(data)
    assert code == "image_parse_error"
    assert why in message


def result(data):
    """The dimensions, or how the image is refused."""
    try:
        return read_header(data)
    except RequestRejected as exc:
        return exc.message


@pytest.mark.parametrize("data", [*REAL.values(), *LARGEST.values()], ids=[*REAL, *map("large {}".format, LARGEST)])
def test_truncated_headers(data):
    """Cut anywhere, a file is refused as long as its header is not whole."""
    results = [result(data[:length]) for length in range(min(len(data), 1000))]
    whole = results.index(read_header(data)) if read_header(data) in results else len(results)
    assert all(message.endswith((" image is truncated", "GIF image", "is empty")) for message in results[:whole])
    assert all(message.endswith(" image is truncated") for message in results[12:whole])
    assert set(results[whole:]) <= {read_header(data)}


@pytest.mark.parametrize(
    ("data", "media_type", "code", "message"),
    [
        (b"", None, "invalid_image_format", "image: the image is empty"),
        (b"BM" + bytes(50), None, "invalid_image_format", "image: not a PNG, JPEG, WebP or GIF image"),
        (b"RIFF\0\0\0\0WAVE", None, "invalid_image_format", "image: not a PNG, JPEG, WebP or GIF image"),
        (
            REAL["JPEG RGB"],
            "image/png",
            "invalid_image_format",
            "image: declared image/png, but the data is a JPEG image",
        ),
        (
            REAL["WEBP RGB"],
            "image/bmp",
            "unsupported_image_media_type",
            "image: the media type must be image/png, image/jpeg, image/webp or image/gif, got 'image/bmp'",
        ),
    ],
)
def test_other_formats(data, media_type, code, message):
    assert refusal(data, media_type=media_type) == (code, message)


@pytest.mark.parametrize("subtype", ["png", "jpeg", "webp", "gif", "jpg"])
def test_declared_formats(subtype):
    format = "jpeg" if subtype == "jpg" else subtype
    assert read_header(encoded(format), media_type=f"image/{subtype}").format == format


STARTS = [data[:40] for data in REAL.values()]


def check(data):
    info = result(data)
    if isinstance(info, str):
        assert len(info) < 300
    else:
        assert 1 <= info.width <= MAX_SIDE
        assert 1 <= info.height <= MAX_SIDE


@given(st.binary(max_size=200))
def test_any_bytes(data):
    check(data)


@given(st.sampled_from(STARTS), st.integers(2, 40), st.binary(max_size=200))
def test_any_bytes_behind_a_signature(start, length, data):
    check(start[:length] + data)


MUTATED = [*REAL.values(), *orientations(), *[data for data, _ in BAD.values() if len(data) < 1000]]


@given(st.data(), st.sampled_from(MUTATED))
def test_mutated_images(data, original):
    mutant = bytearray(original[:1000])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(mutant)))
        mutant[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=8))
    check(bytes(mutant))
