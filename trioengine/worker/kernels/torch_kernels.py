"""The kernels in plain torch, for any device: the reference of all other backends.

Attention gathers the blocks of the paged KV cache into dense keys and values, a few sequences at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import (
    Activation,
    Attention,
    Convolution,
    Decoder,
    DecoderWeights,
    GatedDelta,
    Residual,
    RMSNorm,
    RotaryTable,
    Routing,
)
from trioengine.worker.kernels.batch import ForwardBatch, StateRows
from trioengine.worker.kernels.best_tokens import Best, best_tokens
from trioengine.worker.kernels.decoder import LayerByLayer
from trioengine.worker.kernels.kv_cache import KVCache, KVOrder, dequantized, quantized
from trioengine.worker.kernels.torch_states import convolve, update_delta


class TorchKernels:
    """The reference."""

    name = "torch"
    cache_order = KVOrder.ROWS
    has_window_tables = True
    is_batch_invariant = False  # attention's products are padded to the longest context beside it

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        """For a model with that many heads of queries."""
        self._num_heads, self._dtype = num_heads, dtype

    def add(self, hidden: Tensor, delta: Tensor, residual: Residual) -> Tensor:
        if residual.delta_norm is not None:
            delta = _normalized(delta, residual.delta_norm)
        hidden.add_(delta, alpha=residual.scale)
        return hidden.to(delta.dtype) if residual.norm is None else _normalized(hidden, residual.norm, delta.dtype)

    def norm_heads_(self, heads: Tensor, start: int, stop: int, norm: RMSNorm) -> None:
        part = heads[:, start:stop]
        part.copy_(_normalized(part.reshape(len(part), -1, len(norm.weight)), norm).view(part.shape))

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        """The sine carries the rotation's sign: turning is two products, of the vector and of its swapped halves."""
        cos, sin = rotary.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, size]
        turned = heads[:, :count, : rotary.size]
        swapped = turned.roll(rotary.size // 2, dims=2)
        torch.addcmul(turned * cos, swapped, sin, out=turned)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
        return activated.mul_(up)

    def convolve(self, inputs: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
        return convolve(inputs, convolution, states, rows)

    def route(self, scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        num_routed = scores.shape[1] - routing.has_shared
        ranked, experts = scores[:, :num_routed].float().sort(dim=-1, descending=True, stable=True)
        chosen, weights = experts[:, : routing.num_chosen], ranked.softmax(dim=-1)[:, : routing.num_chosen]
        if routing.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if not routing.has_shared:
            return chosen, weights
        last = torch.full_like(chosen[:, :1], num_routed)
        return torch.cat([chosen, last], dim=-1), torch.cat([weights, scores[:, -1:].float().sigmoid()], dim=-1)

    def mix(self, results: Tensor, weights: Tensor) -> Tensor:
        return (results * weights.unsqueeze(-1)).sum(dim=1).to(results.dtype)

    def update_delta(
        self, inputs: Tensor, delta: GatedDelta, kept: Tensor, matrices: Tensor, rows: StateRows
    ) -> Tensor:
        return update_delta(inputs, delta, kept, matrices, rows)

    def gate_(self, results: Tensor, gates: Tensor) -> None:
        results.mul_(torch.sigmoid(gates))

    def best(self, logits: Tensor) -> Best:
        return best_tokens(logits)

    def attention(self, batch: ForwardBatch, cache: KVCache) -> Attention:
        if not any(cache.windowed):
            return TorchAttention(batch, cache, self._num_heads, self._dtype)
        full, in_windows = (
            TorchAttention(each, cache, self._num_heads, self._dtype, is_windowed)
            for each, is_windowed in ((batch, False), (batch.in_windows(), True))
        )
        return ByLayer(cache, full, in_windows)

    def decoder(self, config: TextConfig, weights: DecoderWeights) -> Decoder:
        return LayerByLayer(self, config, weights)


def _normalized(x: Tensor, norm: RMSNorm, dtype: torch.dtype | None = None) -> Tensor:
    """In `dtype`, or in x's, by the vector norm: torch's rms_norm takes nine kernels on the CPU, twice the time."""
    numbers = x.float()
    length: Tensor = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
    scale = (length * length).mul_(1.0 / x.shape[-1]).add_(norm.epsilon).rsqrt_()
    return (numbers * scale).mul_(norm.weight).to(dtype or x.dtype)


_CPU_GATHER_BYTES = 3 << 20  # keys and values gathered at a time, so that the caches still hold them when they are read
_GPU_GATHER_BYTES = 128 << 20  # the same, so that few kernels are started
_SCORES_BYTES = 1 << 20  # of a prefill: up to here, on the CPU, two products and a softmax beat torch's kernel


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length with one new token each, attended to in one batched product."""

    start: int  # rows of the batch
    stop: int
    rows: Tensor  # [2 * num_seqs * num_kv_heads * num_blocks]: of a layer as [2 * blocks * heads, …]
    lengths: Tensor  # [num_seqs]: tokens of each context
    longest: int  # tokens


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens."""

    start: int
    stop: int
    context_len: int
    rows: Tensor  # [2 * num_kv_heads * num_blocks]
    takes_products: bool  # two, and a softmax, of whole blocks; else torch's kernel


@dataclass(frozen=True, slots=True)
class _View:
    """A layer, and how it is attended to."""

    layer: int
    scale: float  # of the scores
    window: int | None  # tokens that a query sees


class TorchAttention:
    """Blocks are gathered into dense keys and values, a few sequences at a time."""

    def __init__(
        self, batch: ForwardBatch, cache: KVCache, num_heads: int, dtype: torch.dtype, is_windowed: bool = False
    ) -> None:
        """`is_windowed`: whether it is for the layers that have blocks of windows."""
        self._cache = cache
        num_blocks = cache.num_window_blocks if is_windowed else cache.num_blocks
        layout = cache.layout
        self._kv_heads, self._block_size, self._head_dim = layout.num_kv_heads, layout.block_size, layout.head_dim
        self._group_size = num_heads // self._kv_heads
        self._dtype, self._device = dtype, cache.layers[0].device
        self._halves = torch.arange(2, device=self._device) * num_blocks  # the first block of keys, and of values
        self._slots = self._slot_rows(batch)
        self._fresh = self._fresh_blocks(batch)
        self._groups = list(self._decode_groups(batch))
        self._prefills = list(self._make_prefills(batch))
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # by the first row, and the window

    # ---- layout, once a step ----

    def _slot_rows(self, batch: ForwardBatch) -> Tensor:
        """[num_tokens * 2 * num_kv_heads]: rows of a layer as [2 * blocks * heads * block_size, head_dim]."""
        blocks = torch.div(batch.slot_mapping, self._block_size, rounding_mode="floor")
        offsets = batch.slot_mapping - blocks * self._block_size
        heads = torch.arange(self._kv_heads, device=self._device)
        parts = (self._halves[:, None] + blocks[:, None, None]) * self._kv_heads + heads
        return (parts * self._block_size + offsets[:, None, None]).view(-1)

    def _fresh_blocks(self, batch: ForwardBatch) -> Tensor | None:
        """Blocks that this step begins and does not fill.

        Whatever lies in their tail is masked, but must be finite: 0 * nan is nan.
        """
        first_new = batch.context_lens - batch.query_lens
        begun = (batch.context_lens - 1) // self._block_size * self._block_size
        partial = (begun >= first_new) & (batch.context_lens % self._block_size != 0)
        if not partial.any():
            return None
        seqs = np.flatnonzero(partial)
        blocks = batch.block_tables[seqs, begun[seqs] // self._block_size]
        return torch.from_numpy(blocks).to(self._device)

    def _decode_groups(self, batch: ForwardBatch) -> list[_DecodeGroup]:
        groups = []
        at_once = _CPU_GATHER_BYTES if self._device.type == "cpu" else _GPU_GATHER_BYTES
        bytes_per_block = self._kv_heads * self._block_size * self._head_dim * self._dtype.itemsize  # as it is gathered
        start = 0
        while start < batch.num_decodes:
            num_blocks = -(-int(batch.context_lens[start]) // self._block_size)
            stop = min(batch.num_decodes, start + max(1, at_once // (2 * num_blocks * bytes_per_block)))
            groups.append(self._decode_group(batch, start, stop, num_blocks))
            start = stop
        return groups

    def _decode_group(self, batch: ForwardBatch, start: int, stop: int, num_blocks: int) -> _DecodeGroup:
        tables = torch.from_numpy(batch.block_tables[start:stop, :num_blocks]).to(self._device)
        lengths = torch.from_numpy(batch.context_lens[start:stop]).to(self._device)
        return _DecodeGroup(start, stop, self._block_rows(tables), lengths, int(batch.context_lens[start]))

    def _block_rows(self, tables: Tensor) -> Tensor:
        """Keys of all sequences and heads, then values: tables [num_seqs, num_blocks]."""
        heads = torch.arange(self._kv_heads, device=self._device)
        blocks = self._halves[:, None, None, None] + tables[:, None, :]
        return (blocks * self._kv_heads + heads[:, None]).view(-1)

    def _make_prefills(self, batch: ForwardBatch) -> list[_Prefill]:
        prefills = []
        start = batch.num_decodes
        for seq in range(batch.num_decodes, len(batch.query_lens)):
            new, context = int(batch.query_lens[seq]), int(batch.context_lens[seq])
            num_blocks = -(-context // self._block_size)
            tables = torch.from_numpy(batch.block_tables[seq : seq + 1, :num_blocks]).to(self._device)
            takes_products = self._takes_products(new, context)
            prefills.append(_Prefill(start, start + new, context, self._block_rows(tables), takes_products))
            start += new
        return prefills

    def _takes_products(self, new: int, context: int) -> bool:
        scores = self._kv_heads * self._group_size * new * context
        return self._device.type == "cpu" and scores * self._dtype.itemsize <= _SCORES_BYTES

    # ---- masks, once a step for each window ----

    def _decode_mask(self, group: _DecodeGroup, window: int | None, width: int) -> Tensor:
        """[num_seqs * num_kv_heads, 1, width]: -inf beyond the context, and before the window, else 0."""
        key = group.start, window
        if key not in self._masks:
            ends = group.lengths[:, None, None]
            hidden = self._hidden(ends, window, width)
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat_interleave(self._kv_heads, dim=0)
        return self._masks[key]

    def _prefill_mask(self, prefill: _Prefill, window: int | None, width: int) -> Tensor:
        """[num_new, width]: -inf for keys after each new token, and before its window, else 0."""
        key = prefill.start, window
        if key not in self._masks:
            new = prefill.stop - prefill.start
            ends = torch.arange(prefill.context_len - new + 1, prefill.context_len + 1, device=self._device)
            mask = torch.zeros((new, width), dtype=self._dtype, device=self._device)
            self._masks[key] = mask.masked_fill_(self._hidden(ends[:, None], window, width), float("-inf"))
        return self._masks[key]

    def _hidden(self, ends: Tensor, window: int | None, width: int) -> Tensor:
        """True for each of `width` keys that a query must not see: from its end on, or before its window.

        ends [..., 1]: the query's own position, and 1; returns [..., width].
        """
        positions = torch.arange(width, device=self._device)
        hidden = positions >= ends
        return hidden if window is None else hidden | (positions < ends - window)

    # ---- every layer ----

    def forward(self, layer: int, heads: Tensor, scale: float, window: int | None = None) -> Tensor:
        num_heads = self._kv_heads * self._group_size
        query, key_value = heads[:, :num_heads], self._store(layer, heads[:, num_heads:])
        view = _View(layer, scale, window)
        if len(self._groups) == 1 and not self._prefills:
            return self._decode(self._groups[0], query, view)
        result = query.new_empty((query.shape[0], query.shape[1] * self._head_dim))
        for group in self._groups:
            result[group.start : group.stop] = self._decode(group, query[group.start : group.stop], view)
        for prefill in self._prefills:
            rows = slice(prefill.start, prefill.stop)
            attended = self._prefill(prefill, query[rows], key_value[rows], view)
            result[rows].view(attended.shape).copy_(attended)
        return result

    def _store(self, layer: int, key_value: Tensor) -> Tensor:
        """The new keys and values [num_tokens, 2 * num_kv_heads, head_dim], as the cache has them then."""
        cache = self._cache
        numbers = key_value
        if cache.scales:
            numbers, scales = quantized(key_value)
            key_value = dequantized(numbers, scales, self._dtype)
            self._write(cache.scales[layer], scales.reshape(-1))
        self._write(cache.layers[layer], numbers.reshape(-1, self._head_dim))
        return key_value

    def _write(self, cached: Tensor, new: Tensor) -> None:
        """`new` [num_tokens * 2 * num_kv_heads, …] to its slots; a block that is begun is cleared before."""
        if self._fresh is not None:
            cached.index_fill_(1, self._fresh, 0)
        cached.view(-1, *new.shape[1:]).index_copy_(0, self._slots, new)

    def _gather(self, layer: int, rows: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [pairs, num_blocks * block_size, head_dim]; a pair is a sequence and a head."""
        cache = self._cache
        both = cache.layers[layer].flatten(0, 2).index_select(0, rows).view(2, pairs, -1, self._head_dim)
        if cache.scales:
            scales = cache.scales[layer].flatten(0, 2).index_select(0, rows).view(2, pairs, -1)
            both = dequantized(both, scales, self._dtype)
        keys, values = both.unbind()
        return keys, values

    def _decode(self, group: _DecodeGroup, query: Tensor, view: _View) -> Tensor:
        sequences = group.stop - group.start
        pairs = sequences * self._kv_heads
        keys, values = self._gather(view.layer, group.rows, pairs)
        if sequences == 1:
            seen = slice(0 if view.window is None else max(0, group.longest - view.window), group.longest)
            return self._decode_one(query, keys[:, seen], values[:, seen], view)
        heads = query.reshape(pairs, self._group_size, self._head_dim)
        mask = self._decode_mask(group, view.window, keys.shape[1])
        return self._products(heads, keys, values, mask, view).view(sequences, -1)

    def _decode_one(self, query: Tensor, keys: Tensor, values: Tensor, view: _View) -> Tensor:
        """One call instead of three products, which makes a single stream faster; some kernels return a transpose."""
        heads = query.reshape(1, self._kv_heads, self._group_size, self._head_dim)
        result = F.scaled_dot_product_attention(heads, keys[None], values[None], scale=view.scale)
        return result.reshape(1, -1)

    def _prefill(self, prefill: _Prefill, query: Tensor, key_value: Tensor, view: _View) -> Tensor:
        """[num_new, num_kv_heads, group_size, head_dim], a view."""
        heads = query.view(len(query), self._kv_heads, self._group_size, self._head_dim).permute(1, 2, 0, 3)
        context = prefill.context_len
        window = None if view.window is None or view.window >= context else view.window
        if prefill.takes_products:  # of whole blocks: softmax is twice as fast for rows of 16 * n scores
            keys, values = self._gather(view.layer, prefill.rows, self._kv_heads)
            grouped = heads.reshape(self._kv_heads, -1, self._head_dim)
            mask = self._prefill_mask(prefill, window, keys.shape[1]).repeat(self._group_size, 1)
            result = self._products(grouped, keys, values, mask, view).view(heads.shape)
        elif window is not None or context > len(query):
            keys, values = self._gather(view.layer, prefill.rows, self._kv_heads)
            mask = self._prefill_mask(prefill, window, context)
            result = self._fused(heads, keys[:, :context], values[:, :context], mask, view)
        else:
            keys, values = key_value.transpose(0, 1).chunk(2)
            result = self._fused(heads, keys, values, None, view)
        return result.permute(2, 0, 1, 3)

    def _products(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, view: _View) -> Tensor:
        """query [pairs, rows, head_dim]; keys and values [pairs, context, head_dim]; mask as [pairs, rows, context]."""
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=view.scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values)

    def _fused(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, view: _View) -> Tensor:
        """query [num_kv_heads, group_size, num_new, head_dim]; keys and values [num_kv_heads, context, head_dim]."""
        shape = (-1, self._group_size, -1, -1)  # heads of a group share their keys and values: a view
        return F.scaled_dot_product_attention(
            query,
            keys.unsqueeze(1).expand(shape),
            values.unsqueeze(1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=view.scale,
        )


class ByLayer:
    """The attention of a step, for the layers that share all blocks, and for those that have blocks of windows."""

    def __init__(self, cache: KVCache, full: TorchAttention, in_windows: TorchAttention) -> None:
        self._attentions = [in_windows if is_windowed else full for is_windowed in cache.windowed]

    def forward(self, layer: int, heads: Tensor, scale: float, window: int | None = None) -> Tensor:
        return self._attentions[layer].forward(layer, heads, scale, window)
