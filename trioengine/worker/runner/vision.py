"""What the model runner does with images: their shape for the scheduler, and the encoding of a step's tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from trioengine.core.image import ImageInfo, ImageProcessing
from trioengine.worker.decoder import Vision
from trioengine.worker.models.model import VisionModel
from trioengine.worker.runner.model_spec import ModelSpec
from trioengine.worker.scheduling.decode_queue import DecodedImage
from trioengine.worker.scheduling.limits import TileShape
from trioengine.worker.scheduling.pictures import Tile


def vision_of(spec: ModelSpec) -> Vision | None:
    """How the model sees images; None if it takes none."""
    processing = spec.model.images
    if processing is None:
        return None
    feature_bytes = processing.tokens_per_tile * spec.model.text.hidden_size * spec.dtype.itemsize
    tile = TileShape(processing.tokens_per_tile, 3 * processing.tile_size**2, feature_bytes)
    return Vision(tile, lambda data, info: _decode(data, info, processing))


def _decode(data: memoryview, info: ImageInfo, processing: ImageProcessing) -> DecodedImage:
    from trioengine.worker.vision.tiles import read_tiles  # needs Pillow, which a text-only model does not

    tiles = read_tiles(data, info, processing)
    return DecodedImage(tiles, len(tiles))


def encode_tiles(tiles: Sequence[Tile], model: VisionModel) -> None:
    """Give each tile its features [tokens_per_tile, hidden_size]."""
    pixels = torch.stack([cast("Tensor", tile.picture.tiles)[tile.number] for tile in tiles])
    for tile, features in zip(tiles, model.encode(pixels), strict=True):
        tile.picture.features[tile.number] = features.clone()  # no view, which would keep all of them alive
