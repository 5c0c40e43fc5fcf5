"""The tensors of one step: the KV cache, and the batch of tokens that runs over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.scheduling.sequence import BlockCopy, ScheduledSequence, SchedulerOutput

IntArray = npt.NDArray[np.int64]
_CPU_SHARE = 4  # a quarter of the free memory,
_CPU_LIMIT = 4 << 30  # and at most 4 GiB


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values, a tensor a layer: [num_blocks, 2 * num_kv_heads, block_size, head_dim], keys first.

    The memory is not touched before a block is used, and holds anything at all until then.
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    layers: tuple[Tensor, ...]

    @staticmethod
    def allocate(
        model: TextConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Reserve the memory. Raises ModelError if it cannot be had."""
        shape = (num_blocks, 2 * model.num_kv_heads, block_size, model.head_dim)
        try:
            layers = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(model.num_layers))
        except RuntimeError as exc:  # torch's for a lack of memory, also on a GPU
            size = math.prod(shape) * dtype.itemsize * model.num_layers
            raise ModelError(
                f"{size} bytes for the KV cache cannot be had on {device}: lower kv_cache_memory (--kv-cache-memory)"
            ) from exc
        return KVCache(num_blocks, block_size, model.num_kv_heads, layers)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of every layer at once: a block that is both source and target is read first."""
        if copies:
            device = self.layers[0].device
            sources, targets, counts = torch.tensor(copies, device=device).unbind(1)
            behind = torch.arange(self.block_size, device=device) >= counts[:, None]  # [num_copies, block_size]
            for layer in self.layers:
                held = layer.index_select(0, sources).masked_fill_(behind[:, None, :, None], 0.0)
                layer.index_copy_(0, targets, held)


def count_blocks(config: WorkerConfig, model: TextConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many blocks the memory holds. Raises ModelError if it holds none."""
    if config.kv_blocks is not None:
        return config.kv_blocks
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    per_block = per_token * config.block_size
    memory = config.kv_cache_memory
    if memory is None:
        memory = _free_on_cuda(config, device) if device.type == "cuda" else _free_on_cpu()
    if memory < per_block:
        raise ModelError(
            f"kv_cache_memory (--kv-cache-memory) is too small: {memory} bytes hold no block "
            f"of {config.block_size} tokens, which takes {per_block} bytes"
        )
    return memory // per_block


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows of a batch with embeddings of their own, such as an image's, in place of their tokens'."""

    rows: Tensor  # [num_rows], int64, each of them once
    values: Tensor  # [num_rows, hidden_size], in the model's dtype


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step's tokens, flat: first the sequences with one new token, longest context first, then the others.

    Nothing here depends on the attention backend.
    """

    token_ids: Tensor  # [num_tokens], int64
    positions: Tensor  # [num_tokens], int64
    slot_mapping: Tensor  # [num_tokens], int64: block * block_size + offset
    sample_rows: Tensor  # [num_samples], int64: rows of the sampled tokens, in the scheduler's order
    block_tables: IntArray  # [num_seqs, max_blocks], padded with the sequence's own first block
    query_lens: IntArray  # [num_seqs]: new tokens
    context_lens: IntArray  # [num_seqs]: tokens before them and new ones
    num_decodes: int  # sequences with one new token
    block_size: int
    embeddings: EmbeddedRows | None = None  # None: every row has its token's


def make_batch(output: SchedulerOutput, block_size: int, device: torch.device) -> ForwardBatch:
    """Lay out a step; the scheduler guarantees that the block tables cover it."""
    scheduled = output.scheduled
    order = sorted(range(len(scheduled)), key=lambda i: _layout_key(scheduled[i]))
    entries = [scheduled[i] for i in order]
    query_lens = np.array([entry.num_new_tokens for entry in entries], dtype=np.int64)
    computed = np.array([entry.sequence.num_computed_tokens for entry in entries], dtype=np.int64)
    ends = np.cumsum(query_lens)
    sequences = np.repeat(np.arange(len(entries)), query_lens)  # [num_tokens]
    positions = np.arange(ends[-1]) - np.repeat(ends - query_lens - computed, query_lens)
    tables = _block_tables(entries, computed + query_lens, block_size)
    slots = tables[sequences, positions // block_size] * block_size + positions % block_size
    last_rows = dict(zip(order, (ends - 1).tolist(), strict=True))
    samples = [last_rows[i] for i, entry in enumerate(scheduled) if entry.samples]
    return ForwardBatch(
        token_ids=_tensor(_new_token_ids(entries), device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        sample_rows=_tensor(samples, device),
        block_tables=tables,
        query_lens=query_lens,
        context_lens=computed + query_lens,
        num_decodes=int(np.count_nonzero(query_lens == 1)),
        block_size=block_size,
        embeddings=_embeddings(entries, ends - query_lens, device),
    )


def _layout_key(entry: ScheduledSequence) -> tuple[bool, int]:
    return entry.num_new_tokens > 1, -entry.sequence.num_computed_tokens


def _new_token_ids(entries: list[ScheduledSequence]) -> list[int]:
    ids: list[int] = []
    for entry in entries:
        start = entry.sequence.num_computed_tokens
        ids += entry.sequence.token_ids[start : start + entry.num_new_tokens]
    return ids


def _block_tables(entries: list[ScheduledSequence], context_lens: IntArray, block_size: int) -> IntArray:
    counts = (context_lens + block_size - 1) // block_size
    tables = np.empty((len(entries), int(counts.max())), dtype=np.int64)
    for row, entry, count in zip(tables, entries, counts.tolist(), strict=True):
        blocks = entry.sequence.block_table
        row[:count] = blocks[:count]
        row[count:] = blocks[0]
    return tables


def _embeddings(entries: list[ScheduledSequence], starts: IntArray, device: torch.device) -> EmbeddedRows | None:
    """The features of the images' tokens; `starts` are the sequences' first rows."""
    rows: list[int] = []
    values: list[Tensor] = []
    for entry, first in zip(entries, starts.tolist(), strict=True):
        for (picture, number), start, stop, offset in entry.tile_pieces:
            rows += range(first + offset, first + offset + stop - start)
            values.append(cast("Tensor", picture.features[number])[start:stop])
    return EmbeddedRows(_tensor(rows, device), torch.cat(values)) if values else None


def _tensor(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)


def _free_on_cpu() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024 // _CPU_SHARE, _CPU_LIMIT)
    return _CPU_LIMIT


def _free_on_cuda(config: WorkerConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free))
