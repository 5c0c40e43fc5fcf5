"""The kernels in plain torch, for any device: the reference of all other backends.

Attention gathers the blocks of the paged KV cache into dense keys and values, a few sequences at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.functional import silu

from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import Attention, Decoder, DecoderWeights, RMSNorm, RotaryTable
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.decoder import LayerByLayer
from trioengine.worker.kernels.kv_cache import KVCache, dequantized, quantized


class TorchKernels:
    """The reference."""

    name = "torch"
    transposes_keys = False
    is_batch_invariant = False  # attention's products are padded to the longest context beside it

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        """For a model with that many heads of queries."""
        self._num_heads, self._dtype = num_heads, dtype

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
        return TorchAttention(batch, cache, self._num_heads, self._dtype)

    def decoder(self, config: TextConfig, weights: DecoderWeights) -> Decoder:
        return LayerByLayer(self, config, weights)


_CPU_GATHER_BYTES = 3 << 20  # keys and values gathered at a time, so that the caches still hold them when they are read
_GPU_GATHER_BYTES = 128 << 20  # the same, so that few kernels are started
_SCORES_BYTES = 1 << 20  # of a prefill: up to here, on the CPU, two products and a softmax beat torch's kernel


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length with one new token each, attended to in one batched product."""

    start: int  # rows of the batch
    stop: int
    rows: Tensor  # [2 * num_seqs * num_kv_heads * num_blocks]: of the cache as [blocks * heads, block_size * head_dim]
    mask: Tensor  # [num_seqs * num_kv_heads, 1, num_blocks * block_size]: 0, or -inf beyond the context
    longest: int  # tokens


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens."""

    start: int
    stop: int
    context_len: int
    rows: Tensor  # [2 * num_kv_heads * num_blocks]
    products_mask: Tensor | None  # [group_size * num_new, num_blocks * block_size]: 0, or -inf for later tokens
    fused_mask: Tensor | None  # [num_new, context_len]: the same; None: causal


class TorchAttention:
    """Blocks are gathered into dense keys and values, a few sequences at a time."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, num_heads: int, dtype: torch.dtype) -> None:
        self._cache = cache
        layout = cache.layout
        self._kv_heads, self._block_size, self._head_dim = layout.num_kv_heads, layout.block_size, layout.head_dim
        self._group_size = num_heads // self._kv_heads
        self._scale = self._head_dim**-0.5
        self._dtype, self._device = dtype, cache.layers[0].device
        self._slots = self._slot_rows(batch)
        self._fresh = self._fresh_blocks(batch)
        self._groups = list(self._decode_groups(batch))
        self._prefills = list(self._make_prefills(batch))

    # ---- layout, once a step ----

    def _slot_rows(self, batch: ForwardBatch) -> Tensor:
        """[num_tokens * 2 * num_kv_heads]: rows of the cache as [blocks * heads * block_size, head_dim]."""
        blocks = torch.div(batch.slot_mapping, self._block_size, rounding_mode="floor")
        offsets = batch.slot_mapping - blocks * self._block_size
        heads = torch.arange(2 * self._kv_heads, device=self._device)
        return ((blocks[:, None] * len(heads) + heads) * self._block_size + offsets[:, None]).view(-1)

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
        positions = torch.arange(num_blocks * self._block_size, device=self._device)
        mask = torch.zeros((stop - start, 1, len(positions)), dtype=self._dtype, device=self._device)
        mask.masked_fill_(positions >= lengths[:, None, None], float("-inf"))
        mask = mask.repeat_interleave(self._kv_heads, dim=0)
        return _DecodeGroup(start, stop, self._block_rows(tables), mask, int(batch.context_lens[start]))

    def _block_rows(self, tables: Tensor) -> Tensor:
        """Keys of all sequences and heads, then values: tables [num_seqs, num_blocks]."""
        heads = torch.arange(2 * self._kv_heads, device=self._device).view(2, 1, -1, 1)
        return (tables[:, None, :] * heads.numel() + heads).view(-1)

    def _make_prefills(self, batch: ForwardBatch) -> list[_Prefill]:
        prefills = []
        start = batch.num_decodes
        for seq in range(batch.num_decodes, len(batch.query_lens)):
            new, context = int(batch.query_lens[seq]), int(batch.context_lens[seq])
            num_blocks = -(-context // self._block_size)
            tables = torch.from_numpy(batch.block_tables[seq : seq + 1, :num_blocks]).to(self._device)
            rows = self._block_rows(tables)
            products_mask, fused_mask = None, None
            if self._takes_products(new, context):
                mask = self._causal_mask(new, context, num_blocks * self._block_size)
                products_mask = mask.repeat(self._group_size, 1)
            elif context > new:
                fused_mask = self._causal_mask(new, context, context)
            prefills.append(_Prefill(start, start + new, context, rows, products_mask, fused_mask))
            start += new
        return prefills

    def _takes_products(self, new: int, context: int) -> bool:
        scores = self._kv_heads * self._group_size * new * context
        return self._device.type == "cpu" and scores * self._dtype.itemsize <= _SCORES_BYTES

    def _causal_mask(self, new: int, context: int, width: int) -> Tensor:
        """[new, width]: -inf for whatever lies behind each of the last `new` tokens of the context."""
        mask = torch.full((new, width), float("-inf"), dtype=self._dtype, device=self._device)
        return mask.triu_(context - new + 1)

    # ---- every layer ----

    def forward(self, layer: int, heads: Tensor) -> Tensor:
        num_heads = self._kv_heads * self._group_size
        query, key_value = heads[:, :num_heads], self._store(layer, heads[:, num_heads:])
        if len(self._groups) == 1 and not self._prefills:
            return self._decode(self._groups[0], query, layer)
        result = query.new_empty((query.shape[0], query.shape[1] * self._head_dim))
        for group in self._groups:
            result[group.start : group.stop] = self._decode(group, query[group.start : group.stop], layer)
        for prefill in self._prefills:
            rows = slice(prefill.start, prefill.stop)
            attended = self._prefill(prefill, query[rows], key_value[rows], layer)
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
            cached.index_fill_(0, self._fresh, 0)
        cached.view(-1, *new.shape[1:]).index_copy_(0, self._slots, new)

    def _gather(self, layer: int, rows: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [pairs, num_blocks * block_size, head_dim]; a pair is a sequence and a head."""
        cache = self._cache
        both = cache.layers[layer].flatten(0, 1).index_select(0, rows).view(2, pairs, -1, self._head_dim)
        if cache.scales:
            scales = cache.scales[layer].flatten(0, 1).index_select(0, rows).view(2, pairs, -1)
            both = dequantized(both, scales, self._dtype)
        keys, values = both.unbind()
        return keys, values

    def _decode(self, group: _DecodeGroup, query: Tensor, layer: int) -> Tensor:
        sequences = group.stop - group.start
        pairs = sequences * self._kv_heads
        keys, values = self._gather(layer, group.rows, pairs)
        if sequences == 1:
            return self._decode_one(query, keys[:, : group.longest], values[:, : group.longest])
        heads = query.reshape(pairs, self._group_size, self._head_dim)
        return self._products(heads, keys, values, group.mask).view(sequences, -1)

    def _decode_one(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One call instead of three products, which makes a single stream faster; some kernels return a transpose."""
        heads = query.reshape(1, self._kv_heads, self._group_size, self._head_dim)
        return F.scaled_dot_product_attention(heads, keys[None], values[None]).reshape(1, -1)

    def _prefill(self, prefill: _Prefill, query: Tensor, key_value: Tensor, layer: int) -> Tensor:
        """[num_new, num_kv_heads, group_size, head_dim], a view."""
        heads = query.view(len(query), self._kv_heads, self._group_size, self._head_dim).permute(1, 2, 0, 3)
        if prefill.products_mask is not None:  # of whole blocks: softmax is twice as fast for rows of 16 * n scores
            keys, values = self._gather(layer, prefill.rows, self._kv_heads)
            grouped = heads.reshape(self._kv_heads, -1, self._head_dim)
            result = self._products(grouped, keys, values, prefill.products_mask).view(heads.shape)
        elif prefill.fused_mask is not None:
            keys, values = self._gather(layer, prefill.rows, self._kv_heads)
            end = prefill.context_len
            result = self._fused(heads, keys[:, :end], values[:, :end], prefill.fused_mask)
        else:
            keys, values = key_value.transpose(0, 1).chunk(2)
            result = self._fused(heads, keys, values, None)
        return result.permute(2, 0, 1, 3)

    def _products(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """query [pairs, rows, head_dim]; keys and values [pairs, context, head_dim]; mask as [pairs, rows, context]."""
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values)

    def _fused(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """query [num_kv_heads, group_size, num_new, head_dim]; keys and values [num_kv_heads, context, head_dim]."""
        shape = (-1, self._group_size, -1, -1)  # heads of a group share their keys and values: a view
        return F.scaled_dot_product_attention(
            query,
            keys.unsqueeze(1).expand(shape),
            values.unsqueeze(1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
        )
