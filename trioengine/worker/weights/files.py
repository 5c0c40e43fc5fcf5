"""The two kinds of Checkpoint: a directory with safetensors, and a GGUF file.

GGUF tensors are dequantized one at a time, in pieces, so that none is ever whole in float32: those that integers
hold exactly from these, which takes less time, the others by the gguf package.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from trioengine.core.errors import ModelError
from trioengine.core.gguf import GGUFTensor
from trioengine.core.wording import excerpt
from trioengine.hub.checkpoint import map_file, read_gguf, read_safetensors
from trioengine.worker.kernels.integer_weights import IntegerWeight
from trioengine.worker.weights.blocks import EXACT_KINDS, INTEGER_KINDS, dequantize_exact, read_integers
from trioengine.worker.weights.checkpoint import TensorShape

_PIECE = 1 << 19  # elements: 2 MiB in float32, which the caches hold


class SafetensorsCheckpoint:
    """Tensors of a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self.path = path
        header = read_safetensors(path)
        self.config, self._stored = header.config, header.tensors
        self.tensors = {name: TensorShape(info.shape, info.nbytes) for name, info in header.tensors.items()}
        self._files: dict[Path, Any] = {}  # those that are open

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored[name]
        file = stored.file
        try:
            if file not in self._files:
                self._files[file] = safe_open(str(file), framework="pt", device="cpu")
            tensor: torch.Tensor = self._files[file].get_tensor(stored.name)  # a view of the file
        except (SafetensorError, OSError) as exc:  # it has changed since its header was read
            raise ModelError(f"{file} is damaged: {excerpt(str(exc))}") from exc
        if stored.rows is None:
            return tensor.to(dtype, copy=True)
        all_rows = tensor.view(-1, tensor.shape[-1])
        return torch.cat([all_rows[rows.start : rows.stop] for rows in stored.rows]).to(dtype)

    @property
    def integer_share(self) -> float:
        return 0.0

    def read_integers(self, name: str) -> IntegerWeight | None:
        return None

    def close(self) -> None:
        self._files.clear()


class GGUFCheckpoint:
    """Tensors of a GGUF file under their Hugging Face names, in the Hugging Face layout."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self.path = path
        self._mapped = map_file(path)
        self._buffer = memoryview(self._mapped)
        self._executor = ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads()))
        try:
            header = read_gguf(self._buffer, path)
        except ModelError:
            self.close()
            raise
        self.config, self._stored = header.config, header.tensors
        self._interleaved, self._offsets = header.interleaved_heads, header.offsets
        self.tensors = {name: TensorShape(info.shape, info.nbytes) for name, info in header.tensors.items()}

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if offset := self._offsets.get(name):
            return (self._read(name, torch.float32) - offset).to(dtype)
        return self._read(name, dtype)

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        info = self._stored[name]
        data, kind = self._bytes(info), info.type.name
        if kind in EXACT_KINDS and len(info.shape) == 2:
            return self._in_halves(name, dequantize_exact(data, kind, info.shape, dtype))
        return self._in_halves(name, dequantize_gguf(data, kind, info.shape, dtype, self._executor))

    @property
    def integer_share(self) -> float:
        matrices = [info.type.name in INTEGER_KINDS for info in self._stored.values() if len(info.shape) == 2]
        return sum(matrices) / max(1, len(matrices))

    def read_integers(self, name: str) -> IntegerWeight | None:
        info = self._stored[name]
        weight = read_integers(self._bytes(info), info.type.name, info.shape)
        return weight and weight.map_rows(lambda rows: self._in_halves(name, rows))

    def _in_halves(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Undo llama.cpp's order of a tensor's rows: in each head, rows 2i and 2i + 1 become i and i + head_dim / 2."""
        heads = self._interleaved.get(name)
        if heads is None:
            return rows
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _bytes(self, info: GGUFTensor) -> memoryview:
        return self._buffer[info.offset : info.offset + info.nbytes]

    def close(self) -> None:
        self._executor.shutdown()
        with contextlib.suppress(BufferError):  # a traceback still holds a view: the last one unmaps the file
            self._buffer.release()
            self._mapped.close()


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
