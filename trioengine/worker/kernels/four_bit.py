"""Weights of four bits as they are stored, for kernels that read them so: a quarter of bfloat16's memory traffic.

Formats: Q4_0 and Q4_1 of ggml (ggml-common.h). A block is 32 columns of a row: the scale in float16, for Q4_1 the
minimum in float16, then 16 bytes whose low halves are the first 16 codes and whose high halves are the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GROUP = 32  # columns that share a scale

_ZERO_CODE = 8  # of Q4_0, whose blocks have no minimum
_PIECE = 1 << 19  # elements: 2 MiB in float32, which the caches hold


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """`codes * scales + minima`, a scale and a minimum for every GROUP columns of a row."""

    codes: Tensor  # [rows, columns], uint8 from 0 to 15
    scales: Tensor  # [rows, columns / GROUP], float32
    minima: Tensor  # the same

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[rows, columns]; computed in float32, some rows at a time."""
        result = torch.empty(self.codes.shape, dtype=dtype)
        step = max(1, _PIECE // self.codes.shape[1])
        for start in range(0, len(result), step):
            rows = slice(start, start + step)
            groups = self.codes[rows].view(-1, self.scales.shape[1], GROUP)  # [rows, columns / GROUP, GROUP]
            values = (groups * self.scales[rows, :, None]).add_(self.minima[rows, :, None])
            result[rows] = values.flatten(1)
        return result

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> FourBitWeight:
        """The weight with its rows in another order; `change` is given tensors of any number of columns."""
        return FourBitWeight(change(self.codes), change(self.scales), change(self.minima))


def read_four_bit(data: memoryview, kind: str, shape: tuple[int, ...]) -> FourBitWeight | None:
    """The matrix of `shape` in its stored form; None for ggml's other types, and for what is no matrix."""
    if kind not in ("Q4_0", "Q4_1") or len(shape) != 2:
        return None
    numbers = 1 if kind == "Q4_0" else 2  # before a block's codes
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(shape[0], shape[1] // GROUP, 2 * numbers + GROUP // 2)
    halves = blocks[..., 2 * numbers :]
    codes = np.concatenate((halves & 15, halves >> 4), axis=-1).reshape(shape)
    head = blocks[..., : 2 * numbers].copy().view(np.float16).astype(np.float32)  # [rows, blocks, numbers]
    scales, minima = head[..., 0], head[..., 0] * -_ZERO_CODE if kind == "Q4_0" else head[..., 1]
    return FourBitWeight(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (codes, scales, minima)))


def join_four_bit(parts: Iterable[FourBitWeight | None]) -> FourBitWeight | None:
    """The rows of all parts; None where one of them has no such form."""
    present = []
    for part in parts:
        if part is None:
            return None
        present.append(part)
    return FourBitWeight(
        joined([part.codes for part in present]),
        joined([part.scales for part in present]),
        joined([part.minima for part in present]),
    )


def joined(parts: list[Tensor]) -> Tensor:
    """The rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
