"""Matrices as GGUF files store them (ggml-common.h): read as integers of few bits, without dequantizing them.

A block is 32 columns of a row; of the types with `_K` it is 256, in parts of 32 columns with a scale each. Numbers
before the codes are float16. Codes of 4 bits share bytes: in a block of 32 the low halves are the first 16 codes; in
one of 256, of each 32 bytes, the low halves are the codes of one part, and the high halves the codes of the next. The
fifth bits of all codes are in bytes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from trioengine.worker.kernels.integer_weights import GROUP, IntegerWeight, stack_integers, to_integers

Array: TypeAlias = NDArray[Any]
_PIECE = 1 << 20  # bytes that are read at a time, in several times their memory
_PARTS = 8  # of a block of 256 columns


def read_integers(data: memoryview, kind: str, shape: tuple[int, ...]) -> IntegerWeight | None:
    """Read the matrix of `shape` as integers; None for a type without them, or another rank than 2.

    All types are read exactly, except Q6_K, whose scales are for 16 columns: it is quantized again, to 8 bits.
    """
    if len(shape) != 2 or kind not in INTEGER_KINDS:
        return None
    return stack_integers(list(_pieces(data, kind, shape)))


def dequantize_exact(data: memoryview, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of one of EXACT_KINDS, dequantized some rows at a time."""
    result = torch.empty(shape, dtype=dtype)
    start = 0
    for piece in _pieces(data, kind, shape):
        end = start + len(piece.codes)
        result[start:end] = piece.dequantize()
        start = end
    return result


def _pieces(data: memoryview, kind: str, shape: tuple[int, ...]) -> Iterator[IntegerWeight]:
    rows = np.frombuffer(data, dtype=np.uint8).reshape(shape[0], -1)
    step = max(1, _PIECE // rows.shape[1])
    for start in range(0, len(rows), step):
        yield _read_rows(rows[start : start + step], kind, shape[1])


def _read_rows(rows: Array, kind: str, num_columns: int) -> IntegerWeight:
    quantization = GGMLQuantizationType[kind]
    if kind == "Q6_K":
        return to_integers(torch.from_numpy(dequantize(rows, quantization)))
    columns, size = GGML_QUANT_SIZES[quantization]
    codes, scales, minima, zero, bits = _READERS[kind](rows.reshape(len(rows), num_columns // columns, size))
    return IntegerWeight(
        torch.from_numpy(codes.reshape(len(rows), num_columns)),
        _factors(scales),
        None if minima is None else _factors(minima),
        zero,
        bits,
    )


_Parts: TypeAlias = tuple[Array, Array, Array | None, int, int]  # codes, scales, minima, zero, bits of a code


def _q4_0(blocks: Array) -> _Parts:
    return _halves(blocks[..., 2:]), _numbers(blocks, 1)[0], None, 8, 4


def _q4_1(blocks: Array) -> _Parts:
    scales, minima = _numbers(blocks, 2)
    return _halves(blocks[..., 4:]), scales, minima, 0, 4


def _q5_0(blocks: Array) -> _Parts:
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return codes, _numbers(blocks, 1)[0], None, 16, 5


def _q5_1(blocks: Array) -> _Parts:
    scales, minima = _numbers(blocks, 2)
    return _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), scales, minima, 0, 5


def _q8_0(blocks: Array) -> _Parts:
    return blocks[..., 2:] ^ 128, _numbers(blocks, 1)[0], None, 128, 8  # from two's complement


def _q4_k(blocks: Array) -> _Parts:
    return _parts(blocks[..., 16:]), *_scales_and_minima(blocks), 0, 4


def _q5_k(blocks: Array) -> _Parts:
    high = blocks[..., 16:48, None] >> np.arange(_PARTS, dtype=np.uint8) & 1  # a bit for each part
    codes = _parts(blocks[..., 48:]) | np.moveaxis(high, -1, -2).reshape(*blocks.shape[:-1], -1) << 4
    return codes, *_scales_and_minima(blocks), 0, 5


_READERS: dict[str, Callable[[Array], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
INTEGER_KINDS = frozenset((*_READERS, "Q6_K"))
EXACT_KINDS = frozenset(_READERS)  # whose numbers the integers have


def _numbers(blocks: Array, count: int) -> list[Array]:
    """The first numbers of each block, as float32."""
    numbers = blocks[..., : 2 * count].copy().view(np.float16).astype(np.float32)
    return [numbers[..., i] for i in range(count)]


def _halves(codes: Array) -> Array:
    return np.concatenate((codes & 15, codes >> 4), axis=-1)


def _fifth_bits(words: Array) -> Array:
    """[..., 4] -> [..., 32], with the value 16."""
    return np.unpackbits(words, axis=-1, bitorder="little") << 4


def _parts(codes: Array) -> Array:
    """[..., 128] -> [..., 256]."""
    pairs = codes.reshape(*codes.shape[:-1], _PARTS // 2, 1, GROUP)
    return np.concatenate((pairs & 15, pairs >> 4), axis=-2).reshape(*codes.shape[:-1], -1)


def _scales_and_minima(blocks: Array) -> tuple[Array, Array]:
    """Each is a number of the block's times a factor of a part's, of 6 bits: [..., 256 / 32].

    The factors of the last four parts have their upper two bits above the factors of the first four.
    """
    scale, minimum = _numbers(blocks, 2)
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return scale[..., None] * scales, -minimum[..., None] * minima


def _factors(values: Array) -> torch.Tensor:
    """[rows, columns / GROUP], float32."""
    return torch.from_numpy(np.ascontiguousarray(values).reshape(len(values), -1))
