"""Weights of integers: codes of 4 or 8 bits in groups of GROUP columns, and their bytes as integers.h has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trioengine.worker.kernels.linear import joined

GROUP = 32  # columns of a row that share a scale
PANEL = 16  # outputs whose codes lie together
_PANELS = 2  # that are read together
_PAIRS = 32  # of panels that are packed at a time
_ALIGNMENT = 64  # bytes: a step's codes are one line of the cache
_LARGEST = 127  # of a code of 8 bits with a sign
_OFFSET = 128  # that makes it positive


@dataclass(frozen=True, slots=True)
class IntegerWeight:
    """`(codes - zero) * scales + minima`, a scale and a minimum for every GROUP columns of a row."""

    codes: Tensor  # [rows, columns], uint8
    scales: Tensor  # [rows, columns / GROUP], float32 that float16 holds exactly
    minima: Tensor | None  # the same; None: there are none
    zero: int
    bits: int  # 4 or 8

    @property
    def fits_float16(self) -> bool:
        """Whether float16 holds the scales, the minima, and the total of any group's weights."""
        largest = max(self.zero, (1 << self.bits) - 1 - self.zero) * self.scales.abs()
        if self.minima is not None:
            largest = largest + self.minima.abs()
        return bool((GROUP * largest <= torch.finfo(torch.float16).max).all())  # nan is not

    def dequantize(self) -> Tensor:
        """[rows, columns], float32."""
        groups = self.codes.view(-1, self.scales.shape[1], GROUP).float().sub_(self.zero)
        groups.mul_(self.scales[..., None])
        if self.minima is not None:
            groups.add_(self.minima[..., None])
        return groups.flatten(1)

    def totals(self) -> Tensor:
        """The sums of the weights of each group: [rows, columns / GROUP], float32."""
        counts = self.codes.view(len(self.codes), -1, GROUP).sum(dim=-1, dtype=torch.int32) - GROUP * self.zero
        return counts * self.scales if self.minima is None else counts * self.scales + GROUP * self.minima

    def with_minima(self) -> IntegerWeight:
        """The same values: float16 holds the products of zeros, powers of two, with scales, unless they overflow."""
        minima = -self.zero * self.scales if self.minima is None else self.minima
        return IntegerWeight(self.codes, self.scales, minima, 0, self.bits)

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
    if len({(part.minima is None, part.zero) for part in parts}) > 1:
        parts = [part.with_minima() for part in parts]
    minima = [part.minima for part in parts if part.minima is not None]
    return IntegerWeight(
        joined([part.codes for part in parts]),
        joined([part.scales for part in parts]),
        joined(minima) if minima else None,
        parts[0].zero,
        max(part.bits for part in parts),
    )


def can_multiply(shape: torch.Size) -> bool:
    """Whether a weight of this shape [out_features, in_features] has whole panels and groups."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % GROUP == 0


def to_integers(weight: Tensor) -> IntegerWeight:
    """Quantize a weight to 8 bits, as GGUF's Q8_0 does."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=-1) / _LARGEST).half().float()
    codes = torch.where(scales[..., None] > 0, groups / scales[..., None], 0.0).round_().clamp_(-_LARGEST, _LARGEST)
    return IntegerWeight((codes + _OFFSET).to(torch.uint8).flatten(1), scales, None, _OFFSET, 8)


def pack_integers(weight: IntegerWeight) -> Tensor:
    """The bytes of a weight of which `can_multiply`, aligned; made some panels at a time, in little memory."""
    panels, at_once = len(weight.codes) // PANEL, _PANELS * _PAIRS
    whole = panels // _PANELS * _PANELS
    starts = [*range(0, whole, at_once), *([whole] if whole < panels else [])]
    ends = [min(start + at_once, whole) if start < whole else panels for start in starts]
    memory = torch.empty(_packed_size(weight) + _ALIGNMENT, dtype=torch.uint8)
    place = -memory.data_ptr() % _ALIGNMENT
    packed = memory[place : place + _packed_size(weight)]
    place = 0
    for start, end in zip(starts, ends, strict=True):
        piece = _pack_panels(weight.rows(start * PANEL, end * PANEL), _PANELS if start < whole else 1)
        packed[place : place + len(piece)] = piece
        place += len(piece)
    return packed


def _packed_size(weight: IntegerWeight) -> int:
    factors = 2 if weight.minima is None else 3  # of a group, two bytes each
    return weight.codes.numel() * weight.bits // 8 + 2 * factors * weight.scales.numel()


def _pack_panels(weight: IntegerWeight, together: int) -> Tensor:
    """Whole panels, so many together."""
    rows, columns = weight.codes.shape
    panels, groups = rows // PANEL, columns // GROUP
    steps = weight.codes.view(panels, PANEL, columns // 4, 4).transpose(1, 2).reshape(panels, -1, 4 * PANEL)
    if weight.bits == 4:
        steps = steps[:, 0::2] | steps[:, 1::2] << 4
    parts = [steps.view(panels, groups, -1), _halves(weight.scales), _halves(weight.totals())]
    if weight.minima is not None:
        parts.append(_halves(weight.minima))
    streams = [part.view(-1, together, *part.shape[1:]).transpose(1, 2).flatten(2) for part in parts]
    return torch.cat(streams, dim=2).flatten()  # of [panels / together, groups, bytes]


def _halves(values: Tensor) -> Tensor:
    """[rows, groups] -> [panels, groups, 2 * PANEL] bytes of float16."""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).half().contiguous().view(torch.uint8)
