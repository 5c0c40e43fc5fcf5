"""Low-rank adapters of linear layers, of which each row of a step may have another (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from trioengine.worker.kernels.linear import Linear


class LowRank(NamedTuple):
    """A change of some outputs of a linear layer: `y[:, start:stop] += up(down(x))`."""

    start: int
    stop: int
    down: Linear  # [num_rows, in_features] -> [num_rows, rank]
    up: Linear  # [num_rows, rank] -> [num_rows, stop - start]


LoadedAdapter: TypeAlias = Mapping[Linear, Sequence[LowRank]]  # the changes of a model's layers


@dataclass(frozen=True)
class AdaptedRows:
    """Which rows of a step have which adapter."""

    adapters: Sequence[LoadedAdapter]
    choices: Tensor  # [num_rows], int64: the number of each row's adapter, from 1 on; 0: it has none

    def select(self, rows: Tensor) -> AdaptedRows:
        """The same of some of the rows."""
        return replace(self, choices=self.choices.index_select(0, rows))

    def to(self, device: torch.device) -> AdaptedRows:
        return replace(self, choices=self.choices.to(device))

    @cached_property
    def _rows(self) -> list[Tensor]:
        """The rows of each adapter."""
        return [(self.choices == number).nonzero().flatten() for number in range(1, len(self.adapters) + 1)]

    def multiply(self, linear: Linear, x: Tensor) -> Tensor:
        """The product of a layer, changed in each row by the row's adapter: [num_rows, out_features]."""
        y = linear(x)
        for adapter, rows in zip(self.adapters, self._rows, strict=True):
            if (changes := adapter.get(linear)) and len(rows):
                inputs = x.index_select(0, rows)
                for start, stop, down, up in changes:
                    y[:, start:stop].index_add_(0, rows, up(down(inputs)))
        return y
