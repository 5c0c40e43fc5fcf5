"""The kernels of a step: attention, norms, rotation, activation, and all layers of a decoder; one class a backend.

This module is their interface, with the parameters that models pass to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.kv_cache import KVCache
from trioengine.worker.kernels.linear import Linear


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


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one of Llama's layers (arXiv 2302.13971); projections that share their input are one."""

    input_norm: RMSNorm
    qkv: Linear
    output: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All layers, and the norm behind them."""

    layers: Sequence[DecoderLayer]
    norm: RMSNorm
    rotary: RotaryTable


class Decoder(Protocol):
    """All layers of a model."""

    def forward(self, embeddings: Tensor, batch: ForwardBatch, attention: Attention) -> Tensor:
        """Compute the layers, and store their keys and values; the embeddings are consumed.

        embeddings [num_tokens, hidden_size], dtype; returns the normalized hidden states [num_outputs, hidden_size] of
        the batch's output rows, dtype.
        """
        ...


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

    The weights have one `dtype`, and the KV cache the same or int8. The residual stream is in float32.
    """

    @property
    def name(self) -> str:
        """The name in READY."""
        ...

    @property
    def transposes_keys(self) -> bool:
        """Whether it takes a KV cache with transposed keys (KVLayout)."""
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

    def decoder(self, config: TextConfig, weights: DecoderWeights) -> Decoder:
        """Make the decoder of these weights, which are of the config's shape."""
        ...
