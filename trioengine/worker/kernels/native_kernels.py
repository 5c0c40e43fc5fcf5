"""The kernels in C++, for the CPU: native.cpp, compiled for one model on one machine."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.compiler import load_library
from trioengine.worker.kernels.interface import Attention, RMSNorm, RotaryTable
from trioengine.worker.kernels.kv_cache import KVCache

_SOURCE = Path(__file__).with_name("native.cpp")
_ELEMENTS = {torch.float32: "float", torch.bfloat16: "bfloat16"}
_TILE_BYTES = 72 << 10  # of queries, scores and results, in float32
_KEYS, _LANES = 64, 16  # as in native.cpp
_ADDRESS, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "add_norm": (_ADDRESS, _ADDRESS, _ADDRESS, _FLOAT, _COUNT, _COUNT, _ADDRESS),
    "rotate": (_ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS, _ADDRESS),
    "silu_and_multiply": (_ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "store": (_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS),
    "attend": (_ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _COUNT, _FLOAT, _ADDRESS),
}


class NativeKernels:
    """The calls into native.cpp, during which other threads run."""

    name = "native"
    is_batch_invariant = True  # each row by the same operations, in the order of its columns and its context

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int) -> None:
        """Load the library, compiled now if it never was before. Raises KernelsUnavailable, with the reason."""
        self.group_size = num_heads // num_kv_heads
        row_bytes = 4 * (2 * -(-head_dim // _LANES) * _LANES + _KEYS)
        self.tile_size = max(1, _TILE_BYTES // (row_bytes * self.group_size))  # tokens
        self.dtype = dtype
        macros: dict[str, str | int] = {
            "ELEMENT": _ELEMENTS[dtype],
            "HEAD_DIM": head_dim,
            "GROUP_SIZE": self.group_size,
            "TILE_SIZE": self.tile_size,
            "BLOCK_SIZE": block_size,
        }
        self.native = load_library(_SOURCE, macros, tuple(_ARGUMENTS))
        for name, types in _ARGUMENTS.items():
            function = getattr(self.native, name)
            function.argtypes, function.restype = types, None

    def add_norm(self, hidden: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
        rows, size = hidden.shape
        result = torch.empty_like(delta)
        addresses = (_address(hidden, torch.float32), _address(delta, self.dtype), _address(norm.weight, torch.float32))
        self.native.add_norm(*addresses, norm.epsilon, rows, size, result.data_ptr())
        return result

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        tokens, all_heads, _ = heads.shape
        table = _address(rotary.table, self.dtype)
        self.native.rotate(
            _address(heads, self.dtype), tokens, all_heads, count, table, _address(positions, torch.int64)
        )

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape
        result = gate_up.new_empty((rows, size // 2))
        self.native.silu_and_multiply(_address(gate_up, self.dtype), rows, size // 2, result.data_ptr())
        return result

    def attention(self, batch: ForwardBatch, cache: KVCache) -> Attention:
        return _NativeAttention(self, batch, cache)


class _NativeAttention:
    """One step's attention: keys and values are read in place, a tile of queries at a time."""

    def __init__(self, kernels: NativeKernels, batch: ForwardBatch, cache: KVCache) -> None:
        self._kernels, self._cache = kernels, cache
        self._slots = batch.slot_mapping
        self._tables = torch.from_numpy(batch.block_tables)
        self._tiles = _tiles(batch, kernels.tile_size)

    def forward(self, layer: int, heads: Tensor) -> Tensor:
        kernels, kv_heads = self._kernels, self._cache.num_kv_heads
        tokens, _, head_dim = heads.shape
        result = heads.new_empty((tokens, kernels.group_size * kv_heads * head_dim))
        at, cache = _address(heads, kernels.dtype), _address(self._cache.layers[layer], kernels.dtype)
        kernels.native.store(at, tokens, kv_heads, self._slots.data_ptr(), cache)
        kernels.native.attend(
            at,
            kv_heads,
            cache,
            self._tables.data_ptr(),
            self._tables.shape[1],
            self._tiles.data_ptr(),
            len(self._tiles),
            head_dim**-0.5,
            result.data_ptr(),
        )
        return result


def _tiles(batch: ForwardBatch, size: int) -> Tensor:
    """Pieces of at most `size` new tokens of a sequence, as native.cpp's Tile: [num_tiles, 4], int64."""
    counts = -(-batch.query_lens // size)  # tiles of each sequence
    sequences = np.repeat(np.arange(len(counts)), counts)
    offsets = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    new = batch.query_lens[sequences]
    tokens = np.minimum(size, new - offsets)
    rows = (np.cumsum(batch.query_lens) - batch.query_lens)[sequences] + offsets
    contexts = batch.context_lens[sequences] - new + offsets + tokens
    return torch.from_numpy(np.stack((sequences, rows, tokens, contexts), axis=1))


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address, once dtype and layout are checked: C++ would read garbage from any other tensor."""
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise InvariantError(f"a native kernel got {tensor.dtype} in strides {tensor.stride()}, not {dtype} in a row")
    return tensor.data_ptr()
