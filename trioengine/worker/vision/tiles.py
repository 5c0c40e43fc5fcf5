"""An image's tiles, pixel for pixel those of transformers' Idefics3ImageProcessorPil."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trioengine.core.image import ImageInfo
from trioengine.core.image_processing import ImageProcessing
from trioengine.worker.vision.decoding import decode


def read_tiles(data: bytes | memoryview, info: ImageInfo, processing: ImageProcessing) -> Tensor:
    """Decode, resize and split an image: uint8 [num_tiles, 3, tile_size, tile_size], the whole image last.

    Raises ImageError if the bytes cannot be decoded, or are another image than `info` declares.
    """
    grid, size = processing.grid(info.width, info.height), processing.tile_size
    resample = Image.Resampling(processing.resample)
    resized = decode(data, info).resize(grid.scaled, resample).resize(grid.resized, resample)
    if grid.rows == 0:
        return _pixels(resized).permute(2, 0, 1)[None]
    tiles = _pixels(resized).view(grid.rows, size, grid.columns, size, 3).permute(0, 2, 4, 1, 3)
    whole = _pixels(resized.resize((size, size), resample)).permute(2, 0, 1)
    return torch.cat((tiles.flatten(0, 1), whole[None]))


def _pixels(image: Image.Image) -> Tensor:
    """[height, width, 3]"""
    return torch.from_numpy(np.array(image))
