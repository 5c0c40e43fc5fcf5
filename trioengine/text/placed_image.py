"""The places of images in a prompt: in its rendering, and among its token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from trioengine.core.errors import RequestRejected
from trioengine.core.image import Image, ImageProcessing, is_image_part
from trioengine.core.types import TokenIds
from trioengine.text.turns import Message


class TileSpan(NamedTuple):
    """The image tokens of one tile: the index of the first one among the prompt's token ids, and their number."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt; `name` is the place of its part for error messages: prompt[0].content[1]."""

    image: Image
    name: str
    spans: tuple[TileSpan, ...]  # of its tiles, ascending


class ImagePart(NamedTuple):
    """An image, and the indices of its message and of its part there."""

    message: int
    part: int
    image: Image


def image_parts(messages: Iterable[Message]) -> Iterator[ImagePart]:
    """The images in the contents of messages, in their order."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content) if isinstance(content, Sequence) and not isinstance(content, str) else ():
            if is_image_part(part):
                yield ImagePart(index, place, part["image"])


def num_image_tokens(image: Image, processing: ImageProcessing) -> int:
    """The image tokens of all tiles."""
    return processing.num_tiles(image.info.width, image.info.height) * processing.tokens_per_tile


def expanded(rendering: str, images: Sequence[Image], processing: ImageProcessing) -> str:
    """The rendering with the text of each image in the place of its image token.

    Raises RequestRejected if there are more image tokens than images, or fewer. Contents have none: they are protected.
    """
    before, *pieces = rendering.split(processing.image_token)
    if len(pieces) != len(images):
        problem = f"the model's chat template shows {len(pieces)} images in place of the {len(images)} there are"
        raise RequestRejected("template_error", f"messages: {problem}", param="messages")
    texts = [processing.prompt_text(image.info.width, image.info.height) for image in images]
    return before + "".join([text + piece for text, piece in zip(texts, pieces, strict=True)])


def placed(ids: TokenIds, images: Iterable[tuple[str, Image]], processing: ImageProcessing) -> tuple[PlacedImage, ...]:
    """The named images of a prompt of these ids, in the order in which they are there."""
    spans = _spans(ids, processing)
    counts = [(name, image, processing.num_tiles(image.info.width, image.info.height)) for name, image in images]
    return tuple([PlacedImage(image, name, tuple(islice(spans, count))) for name, image, count in counts])


def _spans(ids: TokenIds, processing: ImageProcessing) -> Iterator[TileSpan]:
    """Of every tile; nothing but images makes image tokens."""
    end = 0
    while True:
        start = ids.index(processing.image_token_id, end)
        end = start + processing.tokens_per_tile
        yield TileSpan(start, processing.tokens_per_tile)
