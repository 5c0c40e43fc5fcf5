"""Linear layers of torch.

On the CPU weights are packed once for its kernels, of bfloat16 or of four bits: a quarter of the memory traffic.
Elsewhere a layer is `F.linear`. A row's result may depend on the number of rows, by which the library chooses the order
of its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Linear: TypeAlias = Callable[[Tensor], Tensor]  # [num_tokens, in_features] -> [num_tokens, out_features]

GROUP = 32  # columns that share a scale of four-bit weights
FEW_ROWS = 4  # up to here the four-bit kernel is faster: it reads less, and computes more

_PACKED_FOR = 64  # rows that oneDNN's layout is chosen for; it serves one row as well
_FOUR_BIT_ROWS = 16  # the four-bit kernel takes multiples of these output features
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


def make_linear(weight: Tensor, bias: Tensor | None = None, four_bit: FourBitWeight | None = None) -> Linear:
    """The fastest linear layer for the weight [out_features, in_features] where it lies; the weight is consumed.

    `four_bit` is the same weight as it was stored in four bits, where `wants_four_bit` of the weight.
    """
    if weight.device.type != "cpu":
        return plain_linear(weight, bias)
    many = _packed_linear(weight, bias) if _can_pack(weight.dtype) else plain_linear(weight, bias)
    return many if four_bit is None else _by_rows(_four_bit_linear(four_bit, bias), many)


def plain_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The reference that every backend is checked against."""

    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return linear


def wants_four_bit(weight: Tensor) -> bool:
    """Whether there is a faster kernel for the weight, should it be stored in four bits."""
    is_bfloat16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bfloat16 and len(weight) % _FOUR_BIT_ROWS == 0 and has_four_bit_kernel()


def has_four_bit_kernel() -> bool:
    """Whether this CPU multiplies four-bit weights faster than bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def _by_rows(few: Linear, many: Linear) -> Linear:
    def linear(x: Tensor) -> Tensor:
        return few(x) if len(x) <= FEW_ROWS else many(x)

    return linear


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
    run = torch.ops.mkldnn._linear_pointwise.default
    no_scalars: list[float] = []

    def linear(x: Tensor) -> Tensor:
        result: Tensor = run(x, packed, bias, "none", no_scalars, "")
        return result

    return linear


def _four_bit_linear(weight: FourBitWeight, bias: Tensor | None) -> Linear:
    """torch's kernel computes `(code - 8) * scale + zero` in bfloat16 pairs, and sums in float32."""
    packed = torch._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)  # the tiling is CUDA's, unused here
    zeros = weight.minima + 8 * weight.scales
    scales_and_zeros = torch.stack((weight.scales.t(), zeros.t()), dim=-1).bfloat16()  # [in / GROUP, out, 2]
    run = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def linear(x: Tensor) -> Tensor:
        result: Tensor = run(x.contiguous(), packed, GROUP, scales_and_zeros)
        return result if bias is None else result.add_(bias)

    return linear
