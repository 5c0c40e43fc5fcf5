"""Dequantize GGUF blocks with the gguf package, piece by piece, so that no tensor is ever whole in float32."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_PIECE = 1 << 19  # elements: 2 MiB in float32, which the caches hold


def dequantize_gguf(
    data: memoryview, kind: str, shape: tuple[int, ...], dtype: torch.dtype, executor: Executor
) -> torch.Tensor:
    """The tensor of `shape` (row-major: the last dimension varies fastest) in `dtype`, on the CPU.

    `kind` is ggml's name of a type; `core.gguf` has refused those that the gguf package cannot dequantize.
    """
    quantization = GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[quantization]
    columns = shape[-1]
    stored = np.frombuffer(data, dtype=np.uint8).reshape(-1, columns // elements * size)
    tensor = torch.empty((len(stored), columns), dtype=dtype)

    def convert(start: int) -> None:
        piece = dequantize(stored[start : start + step], quantization).astype(np.float32, copy=True)
        with torch.inference_mode():  # the mode is the thread's
            tensor[start : start + step].copy_(torch.from_numpy(piece).view(-1, columns))

    step = max(1, _PIECE // columns)
    for _ in executor.map(convert, range(0, len(stored), step)):
        pass
    return tensor.view(shape)
