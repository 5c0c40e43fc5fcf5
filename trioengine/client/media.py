"""Images as a program gives them to a client, as the parts of messages that are sent."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from trioengine.actors.media import file_size, unreadable
from trioengine.core.errors import RequestRejected
from trioengine.core.image import BytesLike
from trioengine.core.image_header import check_size, read_header

LONG = 1 << 20  # bytes of images; more are read and encoded in a thread


class SavedImage(Protocol):
    """An image that writes itself as a file, as a PIL.Image.Image does; raw pixels are not sent."""

    @property
    def size(self) -> tuple[int, int]: ...
    def save(self, fp: io.BytesIO, format: str) -> object: ...


Media: TypeAlias = BytesLike | str | Path | SavedImage


def media_parts(media: Sequence[Media]) -> list[dict[str, Any]]:
    """These images as parts of a message. Reads files; raises RequestRejected, naming the place, for what is none."""
    if not isinstance(media, Sequence) or isinstance(media, (str, bytes, bytearray, memoryview)):
        raise RequestRejected("invalid_value", f"media must be a list, got {type(media).__name__}", param="media")
    return [image_part(image, f"media[{index}]") for index, image in enumerate(media)]


def image_part(media: Media, where: str) -> dict[str, Any]:
    """One image as a part of a message, with a data URL."""
    data = memoryview(_encoded(media, where)).cast("B")
    format = read_header(data, where=where).format
    url = f"data:image/{format};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def is_long(media: Sequence[Media]) -> bool:
    """Whether it takes a while to send these; also true of what cannot be sent."""
    try:
        return sum(map(_size, media)) > LONG
    except (OSError, TypeError, ValueError):
        return True


def _size(media: Media) -> int:
    """Bytes, roughly."""
    if isinstance(media, bytes | bytearray | memoryview):
        return memoryview(media).nbytes
    if isinstance(media, str | Path):
        return Path(media).stat().st_size
    if not hasattr(media, "size"):
        return 0
    width, height = media.size
    return int(width) * int(height) * 3


def _encoded(media: Media, where: str) -> BytesLike:
    if isinstance(media, bytes | bytearray | memoryview):
        return media
    if isinstance(media, str | Path):
        return _read(Path(media), where)
    if not (hasattr(media, "save") and hasattr(media, "size")):
        rule = "must be bytes, a path, or an image with a method `save`, as PIL's have"
        raise RequestRejected("invalid_value", f"{where}: {rule}, got {type(media).__name__}", param=where)
    check_size(*media.size, where=where)
    file = io.BytesIO()
    media.save(file, format="PNG")
    return file.getvalue()


def _read(path: Path, where: str) -> bytes:
    file_size(path, where)
    try:
        return path.read_bytes()
    except OSError as exc:
        raise unreadable(path, where, exc) from exc


def has_images(message: Mapping[str, Any]) -> bool:
    """Whether a message that is to be sent has images."""
    return not isinstance(message["content"], str)
