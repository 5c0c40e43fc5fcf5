"""Bytes to an image in RGB, by Pillow.

An image is turned by its EXIF orientation, as transformers turns a file that it loads, and what is transparent lies on
white, as in transformers' `convert_to_rgb`. The orientation is the one that was declared, not Pillow's: the two may
read damaged metadata differently, and the prompt has the tiles of the declared dimensions.
"""

from __future__ import annotations

import warnings
from io import BytesIO

from PIL import Image

from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.image_processing import Size
from trioengine.worker.vision.image_error import ImageError

Image.MAX_IMAGE_PIXELS = None  # an image is as large as its ImageInfo, which was bounded before
warnings.filterwarnings("ignore", module="PIL")  # of damaged metadata

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


def decode(data: bytes | memoryview, info: ImageInfo) -> Image.Image:
    """The image in RGB, of the declared dimensions; of a GIF, its first frame. Raises ImageError.

    It takes four bytes of memory a pixel, and as many for a while where the image is turned or is not stored in RGB.
    """
    declared = (info.width, info.height)
    if info.format is ImageFormat.RGB:
        return _raw(data, declared)
    stored = declared[::-1] if info.orientation >= _FIRST_QUARTER_TURN else declared
    image = _opened(data, info)
    _check_size(image.size, stored)  # before its pixels take memory
    try:
        image.load()
        converted = _in_rgb(image)
        turned = converted.transpose(_TURNS[info.orientation]) if info.orientation in _TURNS else converted
    except Exception as exc:  # decoders raise anything for a damaged file
        raise ImageError(f"the {_name(info)} image is truncated or damaged") from exc
    _check_size(turned.size, declared)
    return turned


def _raw(data: bytes | memoryview, size: Size) -> Image.Image:
    width, height = size
    expected = width * height * 3
    if len(data) != expected:
        raise ImageError(f"an RGB image of {width} x {height} pixels has {expected} bytes, got {len(data)}")
    return Image.frombytes("RGB", size, data)


def _opened(data: bytes | memoryview, info: ImageInfo) -> Image.Image:
    try:
        return Image.open(BytesIO(data), formats=[info.format.name])
    except Exception as exc:  # and so is a header
        raise ImageError(f"the image is no {_name(info)} image, or is truncated or damaged") from exc


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
