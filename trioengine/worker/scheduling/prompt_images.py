"""The images of one prompt: where their tiles lie among its tokens, and what stands there."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from trioengine.core.errors import RequestRejected
from trioengine.core.messages import ImageInput
from trioengine.worker.scheduling.limits import TileShape
from trioengine.worker.scheduling.pictures import Picture, Tile


class TilePiece(NamedTuple):
    """Consecutive tokens of one tile: they take rows `start` to `stop` of the tile's features."""

    tile: Tile
    start: int
    stop: int
    offset: int  # of the first of these tokens, among the tokens that were asked for


class PromptImages:
    """Fixed for the life of a sequence; made by `place_images`."""

    def __init__(self, images: tuple[ImageInput, ...], pictures: tuple[Picture, ...], tile: TileShape) -> None:
        self.pictures = pictures  # one an image: the same one twice, where images are the same
        self._names = {picture: image.name for picture, image in zip(pictures, images, strict=True)}
        self._positions = [position for image in images for position in image.tiles]  # of first tokens, ascending
        self._tiles = [Tile(picture, number) for picture in pictures for number in range(picture.num_tiles)]
        self._tile_size = tile.num_tokens

    def name(self, picture: Picture) -> str:
        """The place of an image in the request, for error messages."""
        return self._names[picture]

    def pieces(self, start: int, end: int) -> list[TilePiece]:
        """The parts of tiles that lie from token `start` to `end`, in order."""
        size = self._tile_size
        found: list[TilePiece] = []
        for index in range(bisect_right(self._positions, start - size), len(self._positions)):
            position = self._positions[index]
            if position >= end:
                break
            first, stop = max(position, start), min(position + size, end)
            found.append(TilePiece(self._tiles[index], first - position, stop - position, first - start))
        return found

    def not_encoded(self, start: int) -> tuple[Picture, ...]:
        """The pictures with tiles that have no features and a token at `start` or behind it, each once."""
        first = bisect_right(self._positions, start - self._tile_size)
        return tuple({tile.picture: None for tile in self._tiles[first:] if not tile.is_encoded})

    def content(self, token_ids: list[int], start: int, end: int) -> list[int]:
        """These tokens, with the images' own ids in their places."""
        ids = token_ids[start:end]
        for (picture, number), first, stop, offset in self.pieces(start, end):
            before = number * self._tile_size
            ids[offset : offset + stop - first] = picture.token_ids[before + first : before + stop]
        return ids


def place_images(
    images: tuple[ImageInput, ...], pictures: tuple[Picture, ...], num_tokens: int, tile: TileShape | None
) -> PromptImages | None:
    """The images of a prompt of that many tokens; None where it has none.

    Raises RequestRejected unless the tiles lie within the prompt, ascending, and none on another.
    """
    if not images:
        return None
    if tile is None:
        raise RequestRejected("invalid_value", f"{images[0].name}: the model takes no images")
    end = 0
    for image in images:
        if not image.tiles:
            raise RequestRejected("invalid_value", f"{image.name}: the image has no tiles")
        for position in image.tiles:
            if position < end:
                raise RequestRejected("invalid_value", f"{image.name}: a tile begins at token {position}, before {end}")
            end = position + tile.num_tokens
    if end > num_tokens:
        raise RequestRejected("invalid_value", f"a tile ends at token {end}, and the prompt has {num_tokens}")
    return PromptImages(images, pictures, tile)
