"""Linear layers whose rows have the same bits whatever other rows a step has.

A library chooses a product's kernel, and with it the order of its sums, by the number of rows: one row may be computed
as a vector, a few by other blocks than many. Which numbers differ depends on the library, the CPU, the shape and the
number of threads, so it is measured: each shape is tried once, and gets the cheapest plan under which all rows agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trioengine.core.errors import ModelError
from trioengine.worker.layers.linear import Linear, make_linear

_MOST = 512  # rows of a product; more are computed in pieces, so that no number of rows occurs that was not covered
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 128, 129, 256, 512)  # rows, tried
_RESULTS = 1 << 23  # elements of the largest result that is tried
_SAMPLES = 3  # distinct rows, repeated: each is seen at many places
_PATTERNS = 16  # distinct rows of the weight that is tried


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
    """The first plan under which a product [out_features, in_features] has invariant rows; None: there is none."""
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
