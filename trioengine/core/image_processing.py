"""How an Idefics3 or SmolVLM model sees an image: cut into square tiles, each of which is a run of image tokens.

The arithmetic is that of transformers' Idefics3ImageProcessor, and the text that of its Idefics3Processor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

Size: TypeAlias = tuple[int, int]  # width, height

MAX_EDGE = 4096  # pixels: no image is scaled beyond it


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """The tiles of one image, which is resized twice: `scaled` keeps its proportions, `resized` is whole tiles."""

    rows: int  # 0 x 0: the image is not split, and is one tile
    columns: int
    scaled: Size  # pixels
    resized: Size

    @property
    def num_tiles(self) -> int:
        """The tiles, row by row, and last the whole image as one tile."""
        return self.rows * self.columns + 1


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """The sizes, tokens and pixel values that config.json and preprocessor_config.json give."""

    image_token: str  # in the chat template's text, where an image stands
    image_token_id: int
    tokens_per_tile: int
    tile_size: int  # pixels of an edge
    longest_edge: int  # pixels to which an image's longer edge is scaled
    splits: bool  # False: an image is always one tile
    mean: tuple[float, float, float]  # of a channel's values after the rescaling
    std: tuple[float, float, float]
    rescale_factor: float = 1 / 255
    resample: int = 1  # Pillow's number of a filter; 1: Lanczos
    fake_token: str = "<fake_token_around_image>"
    global_token: str = "<global-img>"

    def grid(self, width: int, height: int) -> ImageGrid:
        """The tiles of an image of that many pixels, both at least 1."""
        scaled = _bounded(*_scaled(width, height, self.longest_edge))
        if not self.splits:
            return ImageGrid(0, 0, scaled, (self.tile_size, self.tile_size))
        wide, high = resized = _whole_tiles(*scaled, self.tile_size)
        if max(resized) <= self.tile_size:
            return ImageGrid(0, 0, scaled, resized)
        return ImageGrid(high // self.tile_size, wide // self.tile_size, scaled, resized)

    def num_tiles(self, width: int, height: int) -> int:
        """How many tiles an image has; they are in the order of their image tokens, the whole image last."""
        return self.grid(width, height).num_tiles

    def prompt_text(self, width: int, height: int) -> str:
        """The text that takes the place of the chat template's image token."""
        grid = self.grid(width, height)
        whole = self._tile_text(self.global_token) + self.fake_token
        if grid.rows == 0:
            return whole
        rows = (self._row_text(row, grid.columns) for row in range(1, grid.rows + 1))
        return "".join(rows) + "\n" + whole

    def _row_text(self, row: int, columns: int) -> str:
        return "".join(self._tile_text(f"<row_{row}_col_{column}>") for column in range(1, columns + 1)) + "\n"

    def _tile_text(self, place: str) -> str:
        return self.fake_token + place + self.image_token * self.tokens_per_tile


# The divisions are those of transformers, in float64: another order of them gives other sizes.


def _scaled(width: int, height: int, edge: int) -> Size:
    """The longer edge is `edge`, the other one even, and at least 1."""
    ratio = width / height
    if width >= height:
        other = int(edge / ratio)
        return edge, max(other + other % 2, 1)
    other = int(edge * ratio)
    return max(other + other % 2, 1), edge


def _bounded(width: int, height: int) -> Size:
    """Both edges are at most MAX_EDGE."""
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        return MAX_EDGE, max(int(MAX_EDGE / ratio), 1)
    if height > width and height > MAX_EDGE:
        return max(int(MAX_EDGE * ratio), 1), MAX_EDGE
    return width, height


def _whole_tiles(width: int, height: int, tile: int) -> Size:
    """Both edges are multiples of `tile`, at least one: the longer edge the next, and the other one follows it."""
    ratio = width / height
    if width >= height:
        wide = _next_multiple(width, tile)
        return wide, _next_multiple(int(wide / ratio), tile)
    high = _next_multiple(height, tile)
    return _next_multiple(int(high * ratio), tile), high  # int() may give 0: 249 * (1 / 249) is less than 1


def _next_multiple(value: int, of: int) -> int:
    return max(math.ceil(value / of), 1) * of
