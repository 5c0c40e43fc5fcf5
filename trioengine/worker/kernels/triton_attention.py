"""Attention in Triton: queries attend to the blocks of the KV cache where they lie.

A step is divided into tiles: up to a few of a sequence's new tokens, and the queries of one head of keys and values. A
tile goes through its context with running maxima and sums of the softmax (arXiv 2205.14135). Where there are few tiles,
as for one stream, the context of each is divided among several programs, whose results are merged (as in
Flash-Decoding).

The kernels read the plan of a step, its tiles and block tables, from the GPU's memory. So a CUDA graph with these
kernels computes any step with as many tiles, whose plan it is given.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.kv_cache import KVCache, quantized

_QUERIES = 64  # of a tile of several tokens: as many whole tokens as fit
_LEAST_QUERIES = 16  # that the matrix units multiply at a time
_MOST_KEYS, _LEAST_KEYS = 64, 16  # at a time
_KEY_BYTES = 16 << 10  # of keys at a time, so that two stages of keys and values fit the shared memory
_PROGRAMS = 528  # that keep a GPU busy: four for each of some 132 multiprocessors
_MOST_SPLITS = 32  # of a context


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tiles of a step, and its block tables.

    `numbers`, int32: the width of the tables; four of each tile: its sequence, its first row in the batch, its number
    of tokens, and the position of the first; the tables [num_seqs, width].
    """

    numbers: Tensor
    group_size: int  # heads of queries to one of keys and values
    num_decodes: int  # tiles of one token: the first ones, one for each of the first rows
    num_tiles: int
    tile_size: int  # tokens of a tile, at most

    @staticmethod
    def of(batch: ForwardBatch, group_size: int) -> AttentionPlan:
        """For that many heads of queries to each of keys and values."""
        tile_size = max(1, _QUERIES // group_size)
        first_positions = batch.context_lens - batch.query_lens
        first_rows = np.cumsum(batch.query_lens) - batch.query_lens
        counts = -(-batch.query_lens // tile_size)  # of each sequence's tiles
        sequences = np.repeat(np.arange(len(counts)), counts)
        starts = (np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_size
        sizes = np.minimum(batch.query_lens[sequences] - starts, tile_size)
        rows, positions = first_rows[sequences] + starts, first_positions[sequences] + starts
        tiles = np.stack([sequences, rows, sizes, positions], axis=1)
        tables = batch.block_tables
        numbers = np.concatenate([[tables.shape[1]], tiles.ravel(), tables.ravel()]).astype(np.int32)
        return AttentionPlan(torch.from_numpy(numbers), group_size, batch.num_decodes, len(tiles), tile_size)

    @staticmethod
    def most_numbers(num_seqs: int, max_blocks: int) -> int:
        """The numbers of a plan of so many sequences with one new token each, at most."""
        return 1 + num_seqs * (4 + max_blocks)


class TritonAttention:
    """One step's attention."""

    def __init__(self, plan: AttentionPlan, numbers: Tensor, slots: Tensor, cache: KVCache) -> None:
        """`numbers` are the plan's, on the GPU; `slots` are the batch's."""
        self._plan, self._numbers, self._slots, self._cache = plan, numbers, slots, cache
        per_split = plan.num_decodes * cache.layout.num_kv_heads
        wanted = max(1, min(_MOST_SPLITS, _PROGRAMS // per_split)) if per_split else 1
        self._num_splits = 1 << (wanted.bit_length() - 1)  # few numbers: kernels are compiled for each

    def lay_out(self, batch: ForwardBatch) -> None:
        numbers = AttentionPlan.of(batch, self._plan.group_size).numbers
        self._numbers[: len(numbers)].copy_(numbers)

    def forward(self, layer: int, heads: Tensor, scale: float, window: int | None = None) -> Tensor:
        layout, plan = self._cache.layout, self._plan
        num_rows, num_all, head_dim = heads.shape
        num_heads = num_all - 2 * layout.num_kv_heads
        self._store(layer, heads[:, num_heads:])
        result = heads.new_empty((num_rows, num_heads * head_dim))
        if plan.num_decodes:
            self._attend(layer, heads, result, scale, window, slice(plan.num_decodes), 1, self._num_splits)
        if plan.num_tiles > plan.num_decodes:
            tiles = slice(plan.num_decodes, plan.num_tiles)
            self._attend(layer, heads, result, scale, window, tiles, plan.tile_size, 1)
        return result

    def _store(self, layer: int, key_value: Tensor) -> None:
        """The new keys and values [num_tokens, 2 * num_kv_heads, head_dim] to their slots."""
        cache, layout = self._cache, self._cache.layout
        num_rows, num_pairs, head_dim = key_value.shape
        num_blocks = cache.layers[layer].shape[1]
        numbers = key_value
        if cache.scales:
            numbers, scales = quantized(key_value)
            _store[(num_rows,)](
                scales, cache.scales[layer], self._slots, num_pairs, num_pairs, 1, num_blocks, layout.block_size,
                COLUMNS=triton.next_power_of_2(num_pairs),
            )  # fmt: skip
        size = num_pairs * head_dim
        _store[(num_rows,)](
            numbers, cache.layers[layer], self._slots, numbers.stride(0), size, head_dim, num_blocks, layout.block_size,
            COLUMNS=triton.next_power_of_2(size),
        )  # fmt: skip

    def _attend(
        self,
        layer: int,
        heads: Tensor,
        result: Tensor,
        scale: float,
        window: int | None,
        tiles: slice,
        tile_size: int,
        num_splits: int,
    ) -> None:
        """Compute these tiles, of at most `tile_size` tokens; their contexts are divided into `num_splits` parts."""
        cache, layout, plan = self._cache, self._cache.layout, self._plan
        head_dim, num_heads = layout.head_dim, layout.num_kv_heads * plan.group_size
        start, stop = tiles.start or 0, tiles.stop
        parts = totals = result
        if num_splits > 1:  # by row, head and split: a weighted mean of values, and the logarithm of its weight
            parts = result.new_empty((stop, num_heads, num_splits, head_dim), dtype=torch.float32)
            totals = result.new_empty((stop, num_heads, num_splits), dtype=torch.float32)
        columns = max(16, triton.next_power_of_2(head_dim))
        num_keys = max(_LEAST_KEYS, min(_MOST_KEYS, _KEY_BYTES // (columns * heads.itemsize)))
        _attend[(stop - start, layout.num_kv_heads, num_splits)](
            heads,
            cache.layers[layer],
            cache.scales[layer] if cache.scales else result,
            self._numbers,
            result,
            parts,
            totals,
            scale,
            0 if window is None else window,
            start,
            1 + 4 * plan.num_tiles,
            layout.num_kv_heads,
            cache.layers[layer].shape[1],
            GROUP_SIZE=plan.group_size,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=layout.block_size,
            HAS_WINDOW=window is not None,
            IS_QUANTIZED=layout.is_quantized,
            NUM_SPLITS=num_splits,
            QUERIES=max(_LEAST_QUERIES, triton.next_power_of_2(tile_size * plan.group_size)),
            KEYS=num_keys,
            COLUMNS=columns,
            num_warps=4,
            num_stages=2,
        )
        if num_splits > 1:
            _merge[(stop, num_heads)](
                parts, totals, result, num_heads, head_dim, NUM_SPLITS=num_splits, COLUMNS=columns
            )


@triton.jit
def _store(numbers, cached, slots, row_size, size, head_dim, num_blocks, block_size, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    columns = tl.arange(0, COLUMNS)
    inside = columns < size
    values = tl.load(numbers + row * row_size + columns, mask=inside)
    num_kv_heads = size // head_dim // 2
    part = columns // head_dim
    block = part // num_kv_heads * num_blocks + slot // block_size
    head = block * num_kv_heads + part % num_kv_heads
    at = (head * block_size + slot % block_size) * head_dim + columns % head_dim
    tl.store(cached + at, values, mask=inside)


@triton.jit(do_not_specialize=["first_tile"])
def _attend(
    heads,
    cached,
    scales,
    plan,
    result,
    parts,
    totals,
    scale,
    window,
    first_tile,
    tables_at,
    num_kv_heads,
    num_blocks,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tile = plan + 1 + (first_tile + tl.program_id(0)) * 4
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(tile)
    first_row = tl.load(tile + 1)
    num_tokens = tl.load(tile + 2)
    position = tl.load(tile + 3)
    table = plan + tables_at + sequence * tl.load(plan)
    num_heads = num_kv_heads * GROUP_SIZE
    columns = tl.arange(0, COLUMNS)
    has_column = columns < HEAD_DIM
    queries = tl.arange(0, QUERIES)
    tokens = queries // GROUP_SIZE
    head = kv_head * GROUP_SIZE + queries % GROUP_SIZE
    is_query = tokens < num_tokens
    rows = (first_row + tokens).to(tl.int64)
    at = (rows * (num_heads + 2 * num_kv_heads) + head) * HEAD_DIM
    query = tl.load(heads + at[:, None] + columns[None, :], mask=is_query[:, None] & has_column[None, :], other=0.0)
    ends = position + tokens + 1  # of the keys that each query sees
    first, last = 0, position + num_tokens
    if HAS_WINDOW:
        first = tl.maximum(position + 1 - window, 0)
    if NUM_SPLITS > 1:
        length = tl.cdiv(tl.cdiv(last - first, NUM_SPLITS), KEYS) * KEYS
        first += split * length
        last = tl.minimum(last, first + length)
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, COLUMNS], tl.float32)
    factor = scale * 1.4426950408889634  # powers of 2
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < last
        block = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = (block * num_kv_heads + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        value_slot = ((block + num_blocks) * num_kv_heads + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        inside = is_key[:, None] & has_column[None, :]
        key = tl.load(cached + slot[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0)
        value = tl.load(cached + value_slot[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0)
        if IS_QUANTIZED:
            key_scale = tl.load(scales + slot, mask=is_key, other=0.0)
            value_scale = tl.load(scales + value_slot, mask=is_key, other=0.0)
            key = (key.to(tl.float32) * key_scale[:, None]).to(query.dtype)
            value = (value.to(tl.float32) * value_scale[:, None]).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * factor
        is_seen = (keys[None, :] < ends[:, None]) & is_key[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] >= ends[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        most = higher
    if NUM_SPLITS > 1:
        weight = tl.where(total == 0.0, 1.0, total)
        mixed = mixed / weight[:, None]
        at = (rows * num_heads + head) * NUM_SPLITS + split
        tl.store(parts + at[:, None] * HEAD_DIM + columns[None, :], mixed, mask=is_query[:, None] & has_column[None, :])
        tl.store(totals + at, tl.where(total == 0.0, float("-inf"), most + tl.log2(weight)), mask=is_query)
    else:
        at = (rows * num_heads + head) * HEAD_DIM
        mixed = mixed / total[:, None]
        tl.store(result + at[:, None] + columns[None, :], mixed, mask=is_query[:, None] & has_column[None, :])


@triton.jit
def _merge(parts, totals, result, num_heads, head_dim, NUM_SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """The mean of all parts, by their weights."""
    pair = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    splits = tl.arange(0, NUM_SPLITS)
    columns = tl.arange(0, COLUMNS)
    logs = tl.load(totals + pair * NUM_SPLITS + splits)
    weights = tl.exp2(logs - tl.max(logs, axis=0))
    at = (pair * NUM_SPLITS + splits[:, None]) * head_dim + columns[None, :]
    means = tl.load(parts + at, mask=(columns < head_dim)[None, :], other=0.0)
    mean = tl.sum(means * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(result + pair * head_dim + columns, mean, mask=columns < head_dim)
