"""The two kinds of Checkpoint: a directory with safetensors, and a GGUF file.

GGUF tensors are dequantized one at a time, in pieces, so that none is ever whole in float32: those that integers
hold exactly from these, which takes less time, the others by the gguf package.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from trioengine.core.errors import ModelError
from trioengine.core.wording import excerpt
from trioengine.hub.checkpoint import map_file, read_gguf, read_safetensors
from trioengine.hub.gguf_tensors import PlacedTensor, StoredForm, num_rows
from trioengine.hub.model_config import Rows
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
        return tensor.view(-1, tensor.shape[-1])[_numbers(stored.rows)].to(dtype)

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
        self.tensors = {name: TensorShape(info.shape, info.nbytes) for name, info in header.tensors.items()}

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        info = self._stored[name]
        match info.form:
            case StoredForm.SAME:
                return self._read(info, dtype)
            case StoredForm.PLUS_ONE:
                return (self._read(info, torch.float32) - 1).to(dtype)
            case StoredForm.MINUS_EXPONENTIAL:
                return self._read(info, torch.float32).neg_().log_().to(dtype)

    def _read(self, info: PlacedTensor, dtype: torch.dtype) -> torch.Tensor:
        data, kind = self._bytes(info), info.type.name
        if kind in EXACT_KINDS and len(info.shape) == 2:
            tensor = dequantize_exact(data, kind, info.shape, dtype)
        else:
            tensor = dequantize_gguf(data, kind, info.shape, dtype, self._executor)
        return tensor if info.columns is None else tensor[:, _numbers(info.columns)]

    @property
    def integer_share(self) -> float:
        matrices = [info.type.name in INTEGER_KINDS for info in self._stored.values() if len(info.shape) == 2]
        return sum(matrices) / max(1, len(matrices))

    def read_integers(self, name: str) -> IntegerWeight | None:
        info = self._stored[name]
        weight = read_integers(self._bytes(info), info.type.name, info.shape)
        return weight if weight is None or info.columns is None else weight.with_columns(_numbers(info.columns))

    def _bytes(self, info: PlacedTensor) -> memoryview:
        """The tensor's rows, as they are stored."""
        if info.rows is None:
            return self._buffer[info.offset : info.offset + info.nbytes]
        size, end = info.nbytes // num_rows(info.shape), max(rows.stop for rows in info.rows)
        stored = np.frombuffer(self._buffer[info.offset : info.offset + end * size], dtype=np.uint8).reshape(-1, size)
        return memoryview(stored[_numbers(info.rows)].tobytes())

    def close(self) -> None:
        self._executor.shutdown()
        with contextlib.suppress(BufferError):  # a traceback still holds a view: the last one unmaps the file
            self._buffer.release()
            self._mapped.close()


def _numbers(ranges: Rows) -> list[int]:
    return list(chain.from_iterable(ranges))


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
