"""Weights of integers: codes of 4 or 8 bits in groups of GROUP columns, and their bytes as integers.h has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trioengine.worker.kernels.huge_pages import HugePages
from trioengine.worker.kernels.linear import joined

GROUP = 32  # columns of a row that share a scale
PANEL = 16  # outputs whose codes lie together
_ROWS = 64 * PANEL  # that are packed at a time
_CHUNKS = PANEL // 4  # of outputs: instructions that put registers side by side do so in chunks of 128 bits
_WIDEST = 8  # bits of a code
_LARGEST_CODE = 127  # of a code of 8 bits with a sign
_ZERO = 128  # that makes it positive
_LARGEST = 8 * 32_767  # weight of an output, in its unit
_TINY = 1e-30  # of such a unit: less would be subnormal
_MIDDLE = 8  # of the codes for which sums have 16 bits; others are shortened
_TOTAL_STEP, _MINIMUM_STEP = 1 << 8, 1 << 3  # of integers.h, in an output's unit


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """`(codes - zero) * scales + minima`, a scale and a minimum for every GROUP columns of a row."""

    codes: Tensor  # [rows, columns], uint8
    scales: Tensor  # [rows, columns / GROUP], float32
    minima: Tensor | None  # the same; None: there are none
    zero: int
    bits: int  # 4, 5 or 8

    @property
    def is_finite(self) -> bool:
        """Whether all weights are, also counted from another zero."""
        largest = self.scales.abs() * (1 << self.bits)
        if self.minima is not None:
            largest = largest + self.minima.abs()
        return bool(largest.isfinite().all())

    def dequantize(self) -> Tensor:
        """[rows, columns], float32."""
        groups = self.codes.view(-1, self.scales.shape[1], GROUP).float().sub_(self.zero)
        groups.mul_(self.scales[..., None])
        if self.minima is not None:
            groups.add_(self.minima[..., None])
        return groups.flatten(1)

    def with_minima(self) -> IntegerWeight:
        """The same values: products of zeros, powers of two, with scales are exact."""
        minima = -self.zero * self.scales if self.minima is None else self.minima
        return IntegerWeight(self.codes, self.scales, minima, 0, self.bits)

    def with_bits(self, bits: int) -> IntegerWeight:
        """The same values, with codes that are spread over so many bits, `bits` of its own or more."""
        factor = 1 << (bits - self.bits)
        if factor == 1:
            return self
        return IntegerWeight(self.codes * factor, self.scales / factor, self.minima, self.zero * factor, bits)

    def with_columns(self, columns: list[int]) -> IntegerWeight | None:
        """The weight with its columns in another order; None unless whole groups of them keep together."""
        groups = torch.tensor(columns).view(-1, GROUP)
        order = groups[:, 0] // GROUP
        if not torch.equal(groups, GROUP * order[:, None] + torch.arange(GROUP)):
            return None
        minima = None if self.minima is None else self.minima[:, order]
        return IntegerWeight(self.codes[:, columns], self.scales[:, order], minima, self.zero, self.bits)

    def rows(self, start: int, stop: int) -> IntegerWeight:
        """Some rows of the weight, a view."""
        minima = None if self.minima is None else self.minima[start:stop]
        return IntegerWeight(self.codes[start:stop], self.scales[start:stop], minima, self.zero, self.bits)


def join_integers(parts: Iterable[IntegerWeight | None]) -> IntegerWeight | None:
    """The rows of all parts; None where one of them has no such form."""
    present = []
    for part in parts:
        if part is None:
            return None
        present.append(part)
    return stack_integers(present)


def stack_integers(parts: Sequence[IntegerWeight]) -> IntegerWeight:
    """The rows of all parts. If only some have minima, or their zeros differ, all get minima in the place of zeros."""
    bits = max(part.bits for part in parts)
    parts = [part.with_bits(bits) for part in parts]
    if len({(part.minima is None, part.zero) for part in parts}) > 1:
        parts = [part.with_minima() for part in parts]
    minima = [part.minima for part in parts if part.minima is not None]
    return IntegerWeight(
        joined([part.codes for part in parts]),
        joined([part.scales for part in parts]),
        joined(minima) if minima else None,
        parts[0].zero,
        bits,
    )


def can_multiply(shape: torch.Size) -> bool:
    """Whether a weight of this shape [out_features, in_features] has whole panels and groups."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % GROUP == 0


def to_integers(weight: Tensor) -> IntegerWeight:
    """Quantize a weight to 8 bits, as GGUF's Q8_0 does."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = groups.abs().amax(dim=-1) / _LARGEST_CODE
    codes = torch.where(scales[..., None] > 0, groups / scales[..., None], 0.0).round_()
    codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE)  # which subnormal scales may exceed
    return IntegerWeight((codes + _ZERO).to(torch.uint8).flatten(1), scales, None, _ZERO, _WIDEST)


def num_pairs(columns: int) -> int:
    """The pairs of groups of a row; the last may be half a pair."""
    return (columns + 2 * GROUP - 1) // (2 * GROUP)


def pack_integers(weight: IntegerWeight, pages: HugePages) -> tuple[Tensor, Tensor]:
    """The bytes of a weight of which `can_multiply`, aligned, and the units of its outputs, float32.

    They are made some panels at a time, in little memory.
    """
    outputs, columns = weight.codes.shape
    factors = 2 if weight.minima is None else 3  # of a group, two bytes each
    row_size = 2 * num_pairs(columns) * (GROUP * weight.bits // 8 + 2 * factors)
    packed, units = pages.take(outputs * row_size), torch.empty(outputs)
    for start in range(0, outputs, _ROWS):
        end = min(start + _ROWS, outputs)
        packed[start * row_size : end * row_size], units[start:end] = _pack_rows(weight.rows(start, end))
    return packed, units


def _pack_rows(weight: IntegerWeight) -> tuple[Tensor, Tensor]:
    """The bytes and the units of whole panels, whose codes are counted from the middle."""
    middle = 1 << (weight.bits - 1)
    largest = middle * weight.scales.abs()  # weights of a group
    minima = None
    if weight.minima is not None:
        minima = weight.minima + (middle - weight.zero) * weight.scales
        largest = largest + minima.abs()
    units = (largest.amax(dim=1, keepdim=True) / _LARGEST).clamp(min=_TINY)
    scales = weight.scales / units
    counts = weight.codes.view(len(weight.codes), -1, GROUP).sum(dim=-1, dtype=torch.int32) - GROUP * middle
    packed = [
        _pack_codes(weight),
        _pack_factors(scales * (middle / _MIDDLE)),
        _pack_factors(scales * (counts / _TOTAL_STEP)),
    ]
    if minima is not None:
        packed.append(_pack_factors(minima / units / _MINIMUM_STEP))
    return torch.cat(packed, dim=2).flatten(), units.squeeze(1)


def _pack_codes(weight: IntegerWeight) -> Tensor:
    """[panels, pairs of groups, bytes]."""
    rows, columns = weight.codes.shape
    pairs = num_pairs(columns)
    words = pad(weight.codes, (0, 2 * GROUP * pairs - columns)).view(torch.int32)  # of 4 codes
    words = words.view(rows // PANEL, _CHUNKS, 2, 2, pairs, 2, GROUP // 4)  # two registers of two outputs of a chunk
    steps = words.permute(0, 4, 6, 2, 1, 3, 5).contiguous().view(torch.uint8).flatten(3)
    if weight.bits == 4:
        steps = steps[:, :, 0::2] | steps[:, :, 1::2] << 4
    return steps.flatten(2)


def _pack_factors(values: Tensor) -> Tensor:
    """[rows, groups], rounded -> [panels, pairs of groups, 4 * PANEL] bytes."""
    rows, groups = values.shape
    pairs = pad(values.round().short(), (0, groups % 2)).view(rows // PANEL, PANEL, -1, 2)
    return pairs.transpose(1, 2).contiguous().view(torch.uint8).flatten(2)
