"""The kernels of a step beside its matrix products: attention, norms, rotation, activation; one class for each backend.

This module is their interface, with the parameters that models pass to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x * weight / sqrt(mean(x ** 2) + epsilon)` (arXiv 1910.07467)."""

    weight: Tensor  # [size], float32
    epsilon: float


class RotaryTable:
    """Cosines and sines of all positions, each for both halves of a head."""

    def __init__(self, frequencies: Tensor, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        table = torch.cat((cos, cos, -sin, sin), dim=-1)  # the sine carries the rotation's sign
        self.table = table.to(device=device, dtype=dtype)  # [max_positions, 2 * head_dim]


class Attention(Protocol):
    """One step's attention: a backend lays out the batch once, and then runs every layer."""

    def forward(self, layer: int, heads: Tensor) -> Tensor:
        """Store the new keys and values, and attend to the context.

        heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values;
        returns [num_tokens, num_heads * head_dim].
        """
        ...


class Kernels(Protocol):
    """One backend's kernels, for one model; all tensors are contiguous, and on the model's device.

    The weights and the KV cache have one `dtype`. The residual stream is in float32.
    """

    @property
    def name(self) -> str:
        """The name in READY."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether each token's results have the same bits whatever other tokens the step has."""
        ...

    def add_norm(self, hidden: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
        """Add delta to hidden in place, and return the sum's norm, in dtype.

        hidden [num_tokens, size], float32; delta [num_tokens, size], dtype; returns [num_tokens, size].
        """
        ...

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        """Rotate the first `count` heads of [num_tokens, num_heads, head_dim] in place; positions [num_tokens]."""
        ...

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """SwiGLU's `silu(gate) * up` (arXiv 2002.05202): [num_tokens, 2 * size], gates first -> [num_tokens, size]."""
        ...

    def attention(self, batch: ForwardBatch, cache: KVCache) -> Attention:
        """Lay out a step's attention, for all layers."""
        ...
