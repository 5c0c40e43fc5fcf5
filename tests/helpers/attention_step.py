"""A step of attention, on the layouts that it may have, and its results by the formula in float64."""

import math
from copy import copy
from dataclasses import replace

import numpy as np
import torch

from helpers.torch_driver import kv_parts, spoil
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.kv_cache import KVCache, KVLayout, KVOrder, dequantized, quantized

LENGTHS = [  # (new tokens, tokens of context with them); those with one new token first
    [(1, 1)],
    [(1, 300), (1, 64), (1, 65), (1, 16), (1, 2)],
    [(5, 5)],
    [(130, 130)],
    [(40, 100)],
    [(1, 129), (1, 7), (33, 33), (2, 200), (70, 90), (3, 3)],
]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found, expected, dtype):
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double().cpu(), expected, rtol=tolerance, atol=tolerance)


class Step:
    """Sequences of (new, context) tokens in a cache whose unused memory is nan, and their attention in float64."""

    def __init__(self, shape, dtype, lengths, scale=1.0, cache_dtype=None, spoiled=True):
        """`spoiled`: whether the rest is nan, or 0."""
        self.heads, self.kv_heads, self.head_dim, block_size, _ = shape
        counts = [-(-context // block_size) for _, context in lengths]
        blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
        tables = np.zeros((len(lengths), max(counts)), dtype=np.int64)
        layout = KVLayout(cache_dtype or dtype, block_size, self.kv_heads, self.head_dim, KVOrder.ROWS)
        self.cache = KVCache(layout, sum(counts), 1, torch.device("cpu"))
        if spoiled:
            spoil(self.cache)
        else:  # torch's kernels read whole blocks, whose rest they have cleared
            for tensor in (*self.cache.layers, *self.cache.scales):
                tensor.zero_()
        tokens = sum(new for new, _ in lengths)
        self.tokens = randn(tokens, self.heads + 2 * self.kv_heads, self.head_dim, dtype=dtype) * scale
        slots, self.contexts, row = [], [], 0
        for index, (new, context) in enumerate(lengths):
            tables[index, : counts[index]] = [blocks.pop() for _ in range(counts[index])]
            at = [int(tables[index, p // block_size]) * block_size + p % block_size for p in range(context)]
            before = randn(context - new, 2 * self.kv_heads, self.head_dim, dtype=dtype, seed=index) * scale
            for slot, held in zip(at, before, strict=False):
                self.put(slot, held)
            slots += at[context - new :]
            context = torch.cat((before, self.tokens[row : row + new, self.heads :]))
            self.contexts.append(context)
            row += new
        query_lens, context_lens = np.array(lengths).T
        nothing = torch.empty(0, dtype=torch.int64)
        self.batch = ForwardBatch(
            token_ids=nothing,
            positions=nothing,
            slot_mapping=torch.tensor(slots),
            sample_rows=nothing,
            block_tables=tables,
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=sum(new == 1 for new, _ in lengths),
            block_size=block_size,
        )

    def put(self, slot, held):
        """Keys and values [2 * kv_heads, head_dim], by torch."""
        block, place = divmod(slot, self.cache.layout.block_size)
        if self.cache.layout.is_quantized:
            held, scales = quantized(held)
            self.cache.scales[0][:, block, :, place] = scales.view(2, -1)
        for (part, places), heads in zip(kv_parts(self.cache, 0), held.chunk(2), strict=True):
            part[block, :, places[place]] = heads.to(part.dtype)

    def stored(self):
        """[slots, 2 * kv_heads, head_dim], as the cache has them."""
        halves = [part[..., places] for part, places in kv_parts(self.cache, 0)]
        return torch.cat(halves, dim=1).transpose(1, 2).flatten(0, 1)

    def reorder(self, order):
        """Have the same numbers in that order."""
        before = self.cache
        if order is before.layout.order:
            return
        self.cache = KVCache(replace(before.layout, order=order), before.num_blocks, 1, torch.device("cpu"))
        self.cache.scales = before.scales
        for (to, places), (from_, places_before) in zip(kv_parts(self.cache, 0), kv_parts(before, 0), strict=True):
            to[..., places] = from_[..., places_before]

    def stored_scales(self):
        """[slots, 2 * kv_heads]."""
        return torch.cat(self.cache.scales[0].unbind(), dim=1).transpose(1, 2).flatten(0, 1)

    def read_contexts(self):
        """Take the contexts of `expected` from a cache of integers."""
        size = self.cache.layout.block_size
        stored = dequantized(self.stored(), self.stored_scales(), torch.float32)
        for index, (table, context) in enumerate(zip(self.batch.block_tables, self.batch.context_lens, strict=True)):
            self.contexts[index] = stored[[int(table[p // size]) * size + p % size for p in range(context)]]

    def expected(self, window=None):
        results, row = [], 0
        for new, held in zip(self.batch.query_lens.tolist(), self.contexts, strict=True):
            query = self.tokens[row : row + new, : self.heads].double()
            keys, values = (
                half.double().repeat_interleave(self.heads // self.kv_heads, dim=1) for half in held.chunk(2, dim=1)
            )
            scores = torch.einsum("nhd,chd->hnc", query, keys) * self.head_dim**-0.5
            keys_at, queries_at = torch.arange(len(held)), torch.arange(len(held) - new, len(held))[:, None]
            hidden = (keys_at > queries_at) | (keys_at <= queries_at - (window or len(held)))
            weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
            results.append(torch.einsum("hnc,chd->nhd", weights, values).flatten(1))
            row += new
        return torch.cat(results)

    def moved_to(self, device):
        """The same on that device."""
        moved = copy(self)
        moved.cache = KVCache(self.cache.layout, self.cache.num_blocks, 1, device)
        for theirs, ours in ((moved.cache.layers, self.cache.layers), (moved.cache.scales, self.cache.scales)):
            for there, here in zip(theirs, ours, strict=True):
                there.copy_(here)
        moved.tokens = self.tokens.to(device)
        moved.batch = replace(self.batch, slot_mapping=self.batch.slot_mapping.to(device))
        return moved

    def run(self, kernels, window=None):
        self.reorder(kernels.cache_order)
        return kernels.attention(self.batch, self.cache).forward(0, self.tokens, self.head_dim**-0.5, window)
