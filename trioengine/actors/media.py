"""Images as callers give them, and how they become payloads.

Reading a source empties it, so that it keeps the caller's bytes alive neither while they are copied nor afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple, Protocol, TypeAlias

from trioengine.core.errors import RequestRejected
from trioengine.core.image import BytesLike, ImageFormat, ImageInfo, parse_data_url
from trioengine.core.image_header import check_size, read_header
from trioengine.core.wording import brief

CHUNK_SIZE = 1 << 20  # bytes
Seal: TypeAlias = "Callable[[Iterator[BytesLike]], SealedBytes]"


class SealedBytes(Protocol):
    """Bytes outside of this process's memory, which cannot change any more."""

    @property
    def num_bytes(self) -> int: ...

    def close(self) -> None:
        """Give them back, once."""
        ...


class PillowImage(Protocol):
    """A PIL.Image.Image, as far as it is needed here: trioengine does not import Pillow."""

    @property
    def size(self) -> tuple[int, int]: ...
    @property
    def mode(self) -> str: ...
    def convert(self, mode: str) -> PillowImage: ...
    def crop(self, box: tuple[int, int, int, int]) -> PillowImage: ...
    def tobytes(self) -> bytes: ...


Media: TypeAlias = BytesLike | str | Path | PillowImage


@dataclass(slots=True)
class ImageSource:
    """One image of a request. `where` names its part for error messages: media[0], prompt[1].content[0]."""

    where: str
    num_bytes: int  # of the payload, at most
    _open: Callable[[], tuple[ImageInfo, Iterator[BytesLike]]] | None

    def open(self) -> tuple[ImageInfo, Iterator[BytesLike]]:
        """Return its header and its bytes in chunks, once. Raises RequestRejected if it is not an image."""
        open_, self._open = self._open, None
        assert open_ is not None, "a source is opened once"
        return open_()


def source_of(media: Media, where: str) -> ImageSource:
    """An image as an embedder gives it: encoded bytes, a file's path, or a PIL image, whose pixels are sent.

    Reads nothing but a file's size. Raises RequestRejected for anything else, and for a file that cannot be read.
    """
    if isinstance(media, bytes | bytearray | memoryview):
        return ImageSource(where, memoryview(media).nbytes, _bytes_opener(media, where))
    if isinstance(media, str | Path):
        return _file_source(Path(media), where)
    if _is_pillow_image(media):
        width, height = media.size
        check_size(width, height, where=where)
        return ImageSource(where, width * height * 3, _pillow_opener(media, where))
    problem = f"must be bytes, a path or a PIL image, got {type(media).__name__}"
    raise RequestRejected.at(where, "invalid_value", problem)


def source_of_url(url: str, max_bytes: int, where: str) -> ImageSource:
    """An image as a client sends it: a data URL, which is decoded when the source is opened."""

    def open_() -> tuple[ImageInfo, Iterator[BytesLike]]:
        nonlocal url
        media_type, data = parse_data_url(url, max_bytes, where=where)
        url = ""
        info = read_header(data, media_type=media_type, where=where)
        return info, iter((data,))

    return ImageSource(where, len(url) // 4 * 3, open_)


class SealedImage(NamedTuple):
    """An image that was copied out of this process's memory."""

    sealed: SealedBytes
    info: ImageInfo
    digest: bytes  # of all this, under the engine's secret


def seal_images(sources: Sequence[ImageSource], seal: Seal, secret: bytes) -> list[SealedImage]:
    """Copy these images out of this process's memory: all, or none. Blocks.

    Raises RequestRejected if one is not an image, OSError where memory or descriptors are missing.
    """
    images: list[SealedImage] = []
    try:
        for source in sources:
            images.append(_seal(source, seal, secret))
    except BaseException:
        for image in images:
            image.sealed.close()
        raise
    return images


def _seal(source: ImageSource, seal: Seal, secret: bytes) -> SealedImage:
    info, chunks = source.open()
    digest = blake2b(f"{info.format} {info.width} {info.height} ".encode(), digest_size=32, key=secret)

    def digested() -> Iterator[BytesLike]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    sealed = seal(digested())
    if sealed.num_bytes > source.num_bytes:
        sealed.close()
        raise RequestRejected.at(source.where, "invalid_value", "has grown while it was read")
    return SealedImage(sealed, info, digest.digest())


def _bytes_opener(data: BytesLike, where: str) -> Callable[[], tuple[ImageInfo, Iterator[BytesLike]]]:
    view = memoryview(data).cast("B")

    def open_() -> tuple[ImageInfo, Iterator[BytesLike]]:
        nonlocal view
        info, chunks = read_header(view, where=where), iter((view,))
        view = memoryview(b"")
        return info, chunks

    return open_


def _file_source(path: Path, where: str) -> ImageSource:
    def chunks() -> Iterator[BytesLike]:
        try:
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(CHUNK_SIZE):
                    yield chunk
        except OSError as exc:
            raise unreadable(path, where, exc) from exc

    def open_() -> tuple[ImageInfo, Iterator[BytesLike]]:
        try:
            with path.open("rb") as file:
                return read_header(file.read(CHUNK_SIZE), where=where), chunks()
        except OSError as exc:
            raise unreadable(path, where, exc) from exc

    return ImageSource(where, file_size(path, where), open_)


def _is_pillow_image(media: Any) -> bool:
    return all(hasattr(media, name) for name in ("size", "mode", "convert", "crop", "tobytes"))


def _pillow_opener(image: PillowImage, where: str) -> Callable[[], tuple[ImageInfo, Iterator[BytesLike]]]:
    def rows(image: PillowImage) -> Iterator[BytesLike]:
        """Some rows at a time, so that the pixels are not there twice."""
        width, height = image.size
        step = max(1, CHUNK_SIZE // (width * 3))
        for top in range(0, height, step):
            try:
                pixels = image.crop((0, top, width, min(top + step, height))).convert("RGB").tobytes()
            except Exception as exc:  # Pillow reads the file only now, and its decoders raise many types
                problem = f"the PIL image cannot be read: {brief(str(exc))}"
                raise RequestRejected("image_parse_error", f"{where}: {problem}", param=where) from None
            yield pixels

    def open_() -> tuple[ImageInfo, Iterator[BytesLike]]:
        nonlocal image
        width, height = image.size
        info, chunks = ImageInfo(ImageFormat.RGB, width, height), rows(image)
        del image
        return info, chunks

    return open_


def file_size(path: Path, where: str) -> int:
    """Bytes. Raises RequestRejected if it is not a regular file: to open a pipe blocks until it has a writer."""
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise ValueError("Not a regular file")
    except (OSError, ValueError) as exc:
        raise unreadable(path, where, exc) from exc
    return status.st_size


def unreadable(path: Path, where: str, error: Exception) -> RequestRejected:
    """The refusal of a file, with the reason."""
    reason = getattr(error, "strerror", None) or str(error)
    return RequestRejected.at(where, "invalid_value", f"cannot read {brief(str(path))}: {reason}")
