"""An image as the engine knows it: its format and dimensions, never its pixels."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

BytesLike: TypeAlias = bytes | bytearray | memoryview
VISION_MODEL = "HuggingFaceTB/SmolVLM-256M-Instruct"  # one that takes images, for the errors of those that take none


class ImageFormat(enum.StrEnum):
    """How an image's bytes are to be read; RGB: height x width x 3 bytes, without a header."""

    PNG = "png"
    JPEG = "jpeg"
    WEBP = "webp"
    GIF = "gif"  # its first frame
    RGB = "rgb"


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What an image's header declares; nothing is decoded to learn it."""

    format: ImageFormat
    width: int  # pixels, as the image is shown
    height: int
    orientation: int = 1  # how the stored pixels are turned to be shown: 1 to 8, as in EXIF
