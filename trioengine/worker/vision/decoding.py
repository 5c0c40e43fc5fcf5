"""Bytes to an image in RGB, by Pillow.

An image is turned as its EXIF orientation says, as transformers turns a file that it loads, and what is transparent
lies on white, as in transformers' `convert_to_rgb`. But where the declared dimensions are those before a quarter turn,
that turn is not made: the prompt has the tiles of the declared dimensions.
"""

from __future__ import annotations

import warnings
from io import BytesIO

from PIL import ExifTags, Image, ImageOps

from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.image_processing import Size
from trioengine.worker.vision.image_error import ImageError

Image.MAX_IMAGE_PIXELS = None  # an image is as large as its ImageInfo, which was bounded before
warnings.filterwarnings("ignore", module="PIL")  # of damaged metadata

_STRIP = 1 << 20  # pixels that are laid on white at a time: it takes twelve bytes for each
_WHITE = (255, 255, 255, 255)
_ORIENTATION, _QUARTER_TURNS = ExifTags.Base.Orientation, range(5, 9)


def decode(data: bytes | memoryview, info: ImageInfo) -> Image.Image:
    """The image in RGB, of the declared dimensions; of a GIF, its first frame. Raises ImageError.

    It takes four bytes of memory a pixel, and as many for a while where the image is turned or is not stored in RGB.
    """
    declared = (info.width, info.height)
    if info.format is ImageFormat.RGB:
        return _raw(data, declared)
    image = _opened(data, info)
    _check_size(image.size, declared, declared[::-1])  # before its pixels take memory
    try:
        _turn(image, declared)
        converted = _in_rgb(image)
    except Exception as exc:  # decoders raise anything for a damaged file
        raise ImageError(f"the {_name(info)} image is truncated or damaged") from exc
    _check_size(converted.size, declared)
    return converted


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


def _check_size(found: Size, declared: Size, *others: Size) -> None:
    if found not in (declared, *others):
        raise ImageError(f"the image has {found[0]} x {found[1]} pixels, not {declared[0]} x {declared[1]} as declared")


def _turn(image: Image.Image, declared: Size) -> None:
    is_quarter_turn = image.getexif().get(_ORIENTATION) in _QUARTER_TURNS
    if not is_quarter_turn or image.size[::-1] == declared:
        ImageOps.exif_transpose(image, in_place=True)


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
