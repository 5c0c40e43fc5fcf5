"""An image's tiles, pixel for pixel those of transformers' Idefics3ImageProcessorPil.

By numpy alone, as torch would start a pool of threads for the thread that decodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from trioengine.core.image import ImageInfo, ImageProcessing
from trioengine.worker.vision.decoding import decode


def read_tiles(data: bytes | memoryview, info: ImageInfo, processing: ImageProcessing) -> Tensor:
    """Decode, resize and split an image: uint8 [num_tiles, 3, tile_size, tile_size], the whole image last.

    Raises ImageError if the bytes cannot be decoded, or are another image than `info` declares.
    """
    grid, size = processing.grid(info.width, info.height), processing.tile_size
    resample = Image.Resampling(processing.resample)
    resized = decode(data, info).resize(grid.scaled, resample).resize(grid.resized, resample)
    if grid.rows == 0:
        return torch.from_numpy(_pixels(resized, size))
    whole = resized.resize((size, size), resample)
    return torch.from_numpy(np.concatenate((_pixels(resized, size), _pixels(whole, size))))


def _pixels(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """The tiles of an image that is whole tiles, row by row: [num_tiles, 3, size, size]."""
    pixels = np.asarray(image)  # [height, width, 3]
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    tiles = pixels.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(tiles.reshape(-1, 3, size, size))
