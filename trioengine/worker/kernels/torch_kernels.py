"""The kernels in plain torch, for any device: what other backends are checked against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from trioengine.worker.kernels.kernels import Attention, RMSNorm
from trioengine.worker.kernels.torch_attention import TorchAttention
from trioengine.worker.layers.rotary import RotaryTable
from trioengine.worker.runner.batch import ForwardBatch
from trioengine.worker.runner.kv_cache import KVCache


class TorchKernels:
    """The reference."""

    name = "torch"
    is_batch_invariant = False  # attention's products are padded to the longest context beside it

    def __init__(self, num_heads: int) -> None:
        """For a model with that many heads of queries."""
        self._num_heads = num_heads

    def add_norm(self, hidden: Tensor, delta: Tensor, norm: RMSNorm) -> Tensor:
        """By way of the vector norm: torch's own rms_norm takes nine kernels on the CPU, and twice the time."""
        hidden.add_(delta)
        length: Tensor = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)  # [num_tokens, 1]
        scale = (length * length).mul_(1.0 / hidden.shape[-1]).add_(norm.epsilon).rsqrt_()
        return (hidden * scale).mul_(norm.weight).to(delta.dtype)

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        """The sine carries the rotation's sign: turning is two products, of the vector and of its swapped halves."""
        cos, sin = rotary.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, head_dim]
        turned = heads[:, :count]
        tokens, _, size = turned.shape
        swapped = turned.view(tokens, count, 2, size // 2).flip(2).view(tokens, count, size)
        torch.addcmul(turned * cos, swapped, sin, out=turned)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def attention(self, batch: ForwardBatch, cache: KVCache) -> Attention:
        return TorchAttention(batch, cache, self._num_heads)
