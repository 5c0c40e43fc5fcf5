"""The KV cache: its tensors, and how many blocks the memory holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.scheduling.sequence import BlockCopy

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


def count_blocks(
    config: WorkerConfig, model: TextConfig, dtype: torch.dtype, device: torch.device, weights: int
) -> int:
    """Return how many blocks the memory holds beside `weights` bytes. Raises ModelError if it holds none."""
    if config.kv_blocks is not None:
        return config.kv_blocks
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    per_block = per_token * config.block_size
    memory = config.kv_cache_memory
    if memory is None:
        memory = _free_on_cuda(config, device, weights, per_block) if device.type == "cuda" else _free_on_cpu()
    if memory < per_block:
        raise ModelError(
            f"kv_cache_memory (--kv-cache-memory) is too small: {memory} bytes hold no block "
            f"of {config.block_size} tokens, which takes {per_block} bytes"
        )
    return memory // per_block


def _free_on_cpu() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024 // _CPU_SHARE, _CPU_LIMIT)
    return _CPU_LIMIT


def _free_on_cuda(config: WorkerConfig, device: torch.device, weights: int, least: int) -> int:
    """The share of the device's memory, less the memory in use and the weights, which are not loaded yet."""
    free, total = torch.cuda.mem_get_info(device)
    share, used = config.gpu_memory_utilization, total - free
    memory = int(total * share) - used - weights
    if memory < least:
        raise ModelError(
            f"{device} has no room for the KV cache: gpu_memory_utilization (--gpu-memory-utilization) is {share} "
            f"of {total} bytes, of which {used} are in use, and the weights take {weights}"
        )
    return memory
