"""How images are cut into tiles: against transformers' own sizes and texts, and what holds of any image."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trioengine.core.image import MAX_EDGE, ImageGrid, ImageProcessing

REFERENCE = json.loads(Path(__file__).parents[1].joinpath("data/image_grid_reference.json").read_text())
TOKENS = 2


def processing(tile, edge, splits=True):
    half = (0.5, 0.5, 0.5)
    return ImageProcessing("<image>", 7, TOKENS, tile, edge, splits, half, half)


@pytest.fixture(params=REFERENCE)
def case(request):
    return REFERENCE[request.param]


def test_grids_are_those_of_transformers(case):
    images = processing(case["tile"], case["edge"], case["splits"])
    for width, height, rows, columns, *sizes in case["grids"]:
        assert images.grid(width, height) == ImageGrid(rows, columns, tuple(sizes[:2]), tuple(sizes[2:]))


def test_texts_are_those_of_transformers(case):
    images = processing(case["tile"], case["edge"], case["splits"])
    assert [images.prompt_text(*row[:2]) for row in case["grids"][: len(case["texts"])]] == case["texts"]


EDGES = st.integers(1, 100_000)


@given(EDGES, EDGES, st.integers(1, 600), st.integers(1, 6000), st.booleans())
@example(1, 249, 1, 249, True)
def test_any_image(width, height, tile, edge, splits):
    """Tiles fill the resized image, an image token stands for each token of a tile, and the tiles are bounded."""
    images = processing(tile, edge, splits)
    grid = images.grid(width, height)
    assert min(grid.scaled) >= 1
    assert max(grid.scaled) <= MAX_EDGE
    assert grid.resized == (max(grid.columns, 1) * tile, max(grid.rows, 1) * tile)
    assert max(grid.resized) < max(grid.scaled) + 2 * tile
    assert (grid.rows == 0) == (grid.columns == 0)
    assert images.num_tiles(width, height) == grid.num_tiles
    if grid.num_tiles < 200:
        assert images.prompt_text(width, height).count("<image>") == grid.num_tiles * TOKENS
