"""Attention over the paged KV cache: the interface, and the plain-torch backend that others are checked against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trioengine.worker.runner.batch import ForwardBatch
from trioengine.worker.runner.kv_cache import KVCache

_GATHER_BYTES = 3 << 20  # keys and values gathered at a time, so that they are still in the cache when they are read


class Attention(Protocol):
    """One step's attention: a backend lays out the batch once, and then runs every layer."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the new keys and values, and attend to the context.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim];
        returns [num_tokens, num_heads * head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences of similar length with one new token each, attended to in one batched product."""

    start: int  # rows of the batch
    stop: int
    rows: Tensor  # [num_seqs * num_kv_heads * num_blocks]: rows of the cache as [blocks * heads, block_size * head_dim]
    mask: Tensor  # [num_seqs * num_kv_heads, 1, num_blocks * block_size]: 0, or -inf beyond the context
    longest: int  # tokens


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several new tokens."""

    start: int
    stop: int
    context_len: int
    rows: Tensor  # [num_kv_heads * num_blocks]; empty where there is nothing but the new tokens
    mask: Tensor | None  # [num_new, context_len]: 0, or -inf for later tokens; None: causal


class TorchAttention:
    """Attention in plain torch: blocks are gathered into dense keys and values, a few sequences at a time."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, num_heads: int) -> None:
        self._cache = cache
        _, self._kv_heads, self._block_size, self._head_dim = cache.keys[0].shape
        self._group_size = num_heads // self._kv_heads
        self._scale = self._head_dim**-0.5
        self._dtype, self._device = cache.keys[0].dtype, cache.keys[0].device
        self._slots = self._slot_rows(batch)
        self._fresh = self._fresh_blocks(batch)
        self._groups = list(self._decode_groups(batch))
        self._prefills = list(self._make_prefills(batch))

    # ---- layout, once a step ----

    def _slot_rows(self, batch: ForwardBatch) -> Tensor:
        """[num_tokens * num_kv_heads]: rows of the cache as [blocks * heads * block_size, head_dim]."""
        blocks = torch.div(batch.slot_mapping, self._block_size, rounding_mode="floor")
        offsets = batch.slot_mapping - blocks * self._block_size
        heads = torch.arange(self._kv_heads, device=self._device)
        return ((blocks[:, None] * self._kv_heads + heads) * self._block_size + offsets[:, None]).view(-1)

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
        bytes_per_block = self._kv_heads * self._block_size * self._head_dim * self._dtype.itemsize
        start = 0
        while start < batch.num_decodes:
            num_blocks = -(-int(batch.context_lens[start]) // self._block_size)
            stop = min(batch.num_decodes, start + max(1, _GATHER_BYTES // (2 * num_blocks * bytes_per_block)))
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
        heads = torch.arange(self._kv_heads, device=self._device)
        return (tables[:, None, :] * self._kv_heads + heads[:, None]).view(-1)

    def _make_prefills(self, batch: ForwardBatch) -> list[_Prefill]:
        prefills = []
        start = batch.num_decodes
        for seq in range(batch.num_decodes, len(batch.query_lens)):
            new, context = int(batch.query_lens[seq]), int(batch.context_lens[seq])
            rows, mask = torch.empty(0, dtype=torch.int64, device=self._device), None
            if context > new:
                num_blocks = -(-context // self._block_size)
                rows = self._block_rows(
                    torch.from_numpy(batch.block_tables[seq : seq + 1, :num_blocks]).to(self._device)
                )
                mask = torch.full((new, context), float("-inf"), dtype=self._dtype, device=self._device)
                mask.triu_(context - new + 1)
            prefills.append(_Prefill(start, start + new, context, rows, mask))
            start += new
        return prefills

    # ---- every layer ----

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for cache, new in ((keys, key), (values, value)):
            if self._fresh is not None:
                cache.index_fill_(0, self._fresh, 0.0)
            cache.view(-1, self._head_dim).index_copy_(0, self._slots, new.reshape(-1, self._head_dim))
        if len(self._groups) == 1 and not self._prefills:
            return self._decode(self._groups[0], query, keys, values)
        result = query.new_empty((query.shape[0], query.shape[1] * self._head_dim))
        for group in self._groups:
            result[group.start : group.stop] = self._decode(group, query[group.start : group.stop], keys, values)
        for prefill in self._prefills:
            rows = slice(prefill.start, prefill.stop)
            result[rows] = self._prefill(prefill, query[rows], key[rows], value[rows], keys, values)
        return result

    def _gather(self, cache: Tensor, rows: Tensor, pairs: int) -> Tensor:
        """[pairs, num_blocks * block_size, head_dim], where a pair is a sequence and a head."""
        flat = cache.view(-1, self._block_size * self._head_dim)
        return flat.index_select(0, rows).view(pairs, -1, self._head_dim)

    def _decode(self, group: _DecodeGroup, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if group.stop - group.start == 1:
            return self._decode_one(group, query, keys, values)
        pairs = (group.stop - group.start) * self._kv_heads
        dense = self._gather(keys, group.rows, pairs).transpose(1, 2)
        heads = query.reshape(pairs, self._group_size, self._head_dim)
        scores = torch.baddbmm(group.mask, heads, dense, alpha=self._scale)  # [pairs, group_size, context]
        result = torch.bmm(torch.softmax(scores, dim=-1), self._gather(values, group.rows, pairs))
        return result.view(group.stop - group.start, -1)

    def _decode_one(self, group: _DecodeGroup, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One call instead of three products: what counts for a single stream."""
        result = F.scaled_dot_product_attention(
            query.reshape(1, self._kv_heads, self._group_size, self._head_dim),
            self._gather(keys, group.rows, self._kv_heads)[None, :, : group.longest],
            self._gather(values, group.rows, self._kv_heads)[None, :, : group.longest],
        )
        return result.reshape(1, -1)

    def _prefill(
        self, prefill: _Prefill, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        heads = query.view(len(query), self._kv_heads, self._group_size, self._head_dim).permute(1, 2, 0, 3)
        if prefill.mask is None:
            key, value = key.transpose(0, 1), value.transpose(0, 1)
        else:
            key = self._gather(keys, prefill.rows, self._kv_heads)[:, : prefill.context_len]
            value = self._gather(values, prefill.rows, self._kv_heads)[:, : prefill.context_len]
        shape = (-1, self._group_size, -1, -1)  # heads of a group share their keys and values: a view
        result = F.scaled_dot_product_attention(
            heads,
            key.unsqueeze(1).expand(shape),
            value.unsqueeze(1).expand(shape),
            attn_mask=prefill.mask,
            is_causal=prefill.mask is None,
        )
        return result.permute(2, 0, 1, 3).reshape(len(query), -1)
