"""The kernels in Triton, for GPUs: rows in one pass over their numbers, and attention to the blocks of the KV cache.

Products are torch's. All else that a decoder with attention needs is computed with float32 sums, and rounded once.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine.worker.kernels import Activation, Residual, RMSNorm, RotaryTable
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.kv_cache import KVCache
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.kernels.triton_attention import AttentionPlan, TritonAttention

_COLUMNS = 1024  # that a program of `_gate` computes


class TritonKernels(TorchKernels):
    """States and experts are computed by torch."""

    name = "triton"
    has_window_tables = False

    def add(self, hidden: Tensor, delta: Tensor, residual: Residual) -> Tensor:
        num_rows, size = hidden.shape
        result = torch.empty_like(delta)
        norm, delta_norm = residual.norm, residual.delta_norm
        _add[(num_rows,)](
            hidden,
            delta,
            result,
            hidden if norm is None else norm.weight,
            hidden if delta_norm is None else delta_norm.weight,
            residual.scale,
            0.0 if norm is None else norm.epsilon,
            0.0 if delta_norm is None else delta_norm.epsilon,
            size,
            HAS_NORM=norm is not None,
            HAS_DELTA_NORM=delta_norm is not None,
            COLUMNS=triton.next_power_of_2(size),
        )
        return result

    def norm_heads_(self, heads: Tensor, start: int, stop: int, norm: RMSNorm) -> None:
        num_rows, num_heads, head_dim = heads.shape
        size = len(norm.weight)
        _norm_heads[(num_rows, (stop - start) * head_dim // size)](
            heads,
            norm.weight,
            norm.epsilon,
            num_heads * head_dim,
            start * head_dim,
            size,
            COLUMNS=triton.next_power_of_2(size),
            num_warps=4 if size > 256 else 1,
        )

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        num_rows, num_heads, head_dim = heads.shape
        half = rotary.size // 2
        _rotate[(num_rows, count)](
            heads,
            rotary.table,
            positions,
            num_heads * head_dim,
            head_dim,
            half,
            COLUMNS=triton.next_power_of_2(half),
            num_warps=1,
        )

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        result = gate_up.new_empty((num_rows, size))
        is_silu = activation is Activation.SILU
        _gate[(num_rows, triton.cdiv(size, _COLUMNS))](gate_up, result, size, IS_SILU=is_silu, COLUMNS=_COLUMNS)
        return result

    def attention(self, batch: ForwardBatch, cache: KVCache) -> TritonAttention:
        plan = AttentionPlan.of(batch, self._num_heads // cache.layout.num_kv_heads)
        return TritonAttention(plan, plan.numbers.to(cache.layers[0].device), batch.slot_mapping, cache)

    def plan_size(self, num_seqs: int, max_blocks: int) -> int:
        return AttentionPlan.most_numbers(num_seqs, max_blocks)

    def recordable_attention(self, batch: ForwardBatch, cache: KVCache, memory: Tensor) -> TritonAttention:
        plan = AttentionPlan.of(batch, self._num_heads // cache.layout.num_kv_heads)
        attention = TritonAttention(plan, memory, batch.slot_mapping, cache)
        attention.lay_out(batch)
        return attention


@triton.jit
def _normalized(x, weight, epsilon, size):
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + epsilon)) * weight


@triton.jit
def _add(
    hidden,
    delta,
    result,
    weight,
    delta_weight,
    scale,
    epsilon,
    delta_epsilon,
    size,
    HAS_NORM: tl.constexpr,
    HAS_DELTA_NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    inside = columns < size
    at = tl.program_id(0).to(tl.int64) * size + columns
    change = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA_NORM:
        change = _normalized(change, tl.load(delta_weight + columns, mask=inside, other=0.0), delta_epsilon, size)
    total = tl.load(hidden + at, mask=inside, other=0.0) + scale * change
    tl.store(hidden + at, total, mask=inside)
    if HAS_NORM:
        total = _normalized(total, tl.load(weight + columns, mask=inside, other=0.0), epsilon, size)
    tl.store(result + at, total, mask=inside)


@triton.jit
def _norm_heads(heads, weight, epsilon, row_size, start, size, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    inside = columns < size
    at = heads + tl.program_id(0).to(tl.int64) * row_size + start + tl.program_id(1) * size + columns
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, _normalized(x, tl.load(weight + columns, mask=inside, other=0.0), epsilon, size), mask=inside)


@triton.jit
def _rotate(heads, table, positions, row_size, head_dim, half, COLUMNS: tl.constexpr):
    """The table's rows are cosines of both halves, then sines with the rotation's sign."""
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    inside = columns < half
    angles = table + tl.load(positions + row) * (4 * half) + columns
    first = heads + row.to(tl.int64) * row_size + tl.program_id(1) * head_dim + columns
    x = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    first_cos = tl.load(angles, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(angles + half, mask=inside, other=0.0).to(tl.float32)
    minus_sin = tl.load(angles + 2 * half, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angles + 3 * half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, x * first_cos + y * minus_sin, mask=inside)
    tl.store(first + half, y * second_cos + x * sin, mask=inside)


@triton.jit
def _gate(gate_up, result, size, IS_SILU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        activated = gate / (1.0 + tl.exp(-gate))
    else:  # GELU by tanh, which is 1 - 2 / (1 + exp(2 * x))
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    tl.store(result + row * size + columns, activated * up, mask=inside)
