"""Linear layers.

On the CPU weights are packed once for its kernels, of bfloat16 or of four bits: a quarter of the memory traffic.
Elsewhere a layer is `F.linear`.

With InvariantLinears a row's result has the same bits whatever other rows a step has. A library chooses a product's
kernel, and with it the order of its sums, by the number of rows: one row may be computed as a vector, a few by other
blocks than many. Which numbers differ depends on the library, the CPU, the shape and the number of threads, so it is
measured: each shape is tried once, and gets the cheapest plan under which all rows agree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trioengine.core.errors import ModelError

Linear: TypeAlias = Callable[[Tensor], Tensor]  # [num_tokens, in_features] -> [num_tokens, out_features]

GROUP = 32  # columns that share a scale of four-bit weights
FEW_ROWS = 4  # up to here the four-bit kernel is faster: it reads less, and computes more

_PACKED_FOR = 64  # rows that oneDNN's layout is chosen for; it serves one row as well
_FOUR_BIT_ROWS = 16  # the four-bit kernel takes multiples of these output features
_PIECE = 1 << 19  # elements: 2 MiB in float32, which the caches hold

# of the search for invariant rows
_MOST = 512  # rows of a product; more are computed in pieces, so that no number of rows occurs that was not covered
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 128, 129, 256, 512)  # rows, tried
_RESULTS = 1 << 23  # elements of the largest result that is tried
_SAMPLES = 3  # distinct rows, repeated: each is seen at many places
_PATTERNS = 16  # distinct rows of the weight that is tried


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


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The numbers of rows that a product is computed with: from `least` to `most`, in multiples of `multiple`."""

    least: int
    multiple: int
    most: int

    def apply(self, linear: Linear) -> Linear:
        """The same layer, computed by this plan: rows of zeros are added, and results cut off."""

        def planned(x: Tensor) -> Tensor:
            rows = len(x)
            if rows > self.most:
                return torch.cat([planned(x[start : start + self.most]) for start in range(0, rows, self.most)])
            padded = max(self.least, -(-rows // self.multiple) * self.multiple)
            return linear(x) if rows in (0, padded) else linear(F.pad(x, (0, 0, 0, padded - rows)))[:rows]

        return planned


def row_plans(most: int) -> tuple[RowPlan, ...]:
    """All plans, the cheapest first: as it is; no single rows; whole blocks of 16; one block of 16 at a time."""
    return RowPlan(1, 1, most), RowPlan(2, 1, most), RowPlan(16, 16, most), RowPlan(16, 16, 16)


class InvariantLinears:
    """Makes linear layers for the CPU, and remembers the plan of each shape, dtype and presence of a bias."""

    def __init__(self, *, is_required: bool) -> None:
        """`is_required`: whether a shape without a plan is an error, or only a warning on stderr."""
        self._is_required = is_required
        self._plans: dict[tuple[torch.Size, torch.dtype, bool], RowPlan | None] = {}

    def make(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The layer of a weight [out_features, in_features], which is consumed.

        Raises ModelError if none of the plans gives the same bits and they are required.
        """
        key = weight.shape, weight.dtype, bias is not None
        if key not in self._plans:
            self._plans[key] = self._choose(*key)
        plan, linear = self._plans[key], make_linear(weight, bias)
        return linear if plan is None else plan.apply(linear)

    def _choose(self, shape: torch.Size, dtype: torch.dtype, has_bias: bool) -> RowPlan | None:
        plan = find_plan(shape, dtype, has_bias=has_bias)
        if plan is None:
            problem = f"products of {shape[0]} x {shape[1]} in {str(dtype).removeprefix('torch.')} depend on the batch"
            if self._is_required:
                raise ModelError(f"batch_invariant: {problem} on this machine; run without batch_invariant")
            sys.stderr.write(f"trioengine: {problem} on this machine: answers are not repeatable\n")
        return plan


def find_plan(shape: torch.Size, dtype: torch.dtype, *, has_bias: bool) -> RowPlan | None:
    """The first plan under which a product [out_features, in_features] has invariant rows, or None."""
    weight, x = _cancelling(shape, dtype)
    linear = make_linear(weight, torch.zeros(shape[0], dtype=dtype) if has_bias else None)
    del weight
    most = min(_MOST, max(16, 1 << (_RESULTS // shape[0]).bit_length() - 1))
    return next((plan for plan in row_plans(most) if _is_invariant(plan.apply(linear), x, most)), None)


def _cancelling(shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight and rows whose exact products are all 0, each term having its negative at a random place.

    So the results are the sums' rounding errors alone, of which bfloat16 shows another order as well as float32 does.
    """
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(in_features, generator=generator)
    half = torch.randn((_PATTERNS + _SAMPLES, in_features // 2), generator=generator).to(dtype)
    rest = torch.zeros((len(half), in_features % 2), dtype=dtype)
    weight = torch.cat((half, half, rest), dim=1)[:_PATTERNS, order]
    x = torch.cat((half, -half, rest), dim=1)[_PATTERNS:, order]
    return weight.repeat(-(-out_features // _PATTERNS), 1)[:out_features].contiguous(), x.contiguous()


def _is_invariant(linear: Linear, x: Tensor, most: int) -> bool:
    alone = torch.cat([linear(row[None]) for row in x])  # [_SAMPLES, out_features]
    return all(torch.equal(_bits(linear(x[places])), _bits(alone)[places]) for places in _places(most))


def _places(most: int) -> Iterator[Tensor]:
    """For each number of rows, the sample at each place."""
    for count in _COUNTS:
        if count <= most:
            yield torch.arange(count) % _SAMPLES


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
