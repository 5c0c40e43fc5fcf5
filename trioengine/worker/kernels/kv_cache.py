"""The KV cache: its tensors, their quantization, and how many blocks the memory holds."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels.huge_pages import reserve
from trioengine.worker.kernels.state_cache import dtype_of
from trioengine.worker.scheduling.sequence import MAX_FORCED, NO_WINDOWS, BlockCopy, Windows

_CPU_SHARE = 4  # a quarter of the free memory,
_CPU_LIMIT = 4 << 30  # and at most 4 GiB
_SCALE = torch.float32
_MOST = 127  # of the integers' magnitude
_LEAST = 1e-30  # of a head's largest magnitude: below all its integers are 0


class KVOrder(enum.IntEnum):
    """The order of the elements that a head has in a block; the numbers are native.cpp's."""

    ROWS = 0  # keys and values [block_size, head_dim]
    TRANSPOSED_KEYS = 1  # keys [head_dim, block_size]; values [block_size, head_dim]
    PAIRS = 2  # keys [head_dim / 2, block_size, 2]; values [block_size / 2, head_dim, 2]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of a layer: a tensor of [2, num_blocks, num_kv_heads, block_size * head_dim], keys first.

    The keys of all heads of a block lie side by side, as do the values: a CPU reads long runs of memory faster.
    """

    dtype: torch.dtype  # the model's, or int8: `quantized`
    block_size: int
    num_kv_heads: int
    head_dim: int
    order: KVOrder  # the kernels' `cache_order`

    @property
    def is_quantized(self) -> bool:
        """Whether each token's integers have a scale."""
        return self.dtype == torch.int8

    @property
    def token_bytes(self) -> int:
        """Of a token in a layer."""
        return 2 * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + _SCALE.itemsize * self.is_quantized)

    def places(self) -> tuple[Tensor, Tensor]:
        """The place of each token's elements among a head's in a block, [block_size, head_dim]: of keys, of values."""
        size, head_dim = self.block_size, self.head_dim
        rows = torch.arange(size * head_dim)
        if self.order is KVOrder.PAIRS:
            keys = rows.view(head_dim // 2, size, 2).transpose(0, 1)
            return keys.reshape(size, head_dim), rows.view(size // 2, head_dim, 2).mT.reshape(size, head_dim)
        is_transposed = self.order is KVOrder.TRANSPOSED_KEYS
        return rows.view(head_dim, size).t() if is_transposed else rows.view(size, head_dim), rows.view(size, head_dim)


class KVCache:
    """Keys and values of every layer.

    The memory is not touched before a block is used, and holds anything at all until then.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        num_layers: int,
        device: torch.device,
        windows: Windows = NO_WINDOWS,
        windowed: Sequence[bool] = (),
    ) -> None:
        """Reserve the memory. Raises ModelError if it cannot be had.

        `windowed`: the layers that have the blocks of `windows`; empty: none has.
        """
        self.layout, self.num_blocks, self.num_window_blocks = layout, num_blocks, windows.num_blocks
        self.windowed = tuple(windowed) or (False,) * num_layers  # for each layer: whether it has blocks of windows
        counts = [windows.num_blocks if is_windowed else num_blocks for is_windowed in self.windowed]
        shapes = [(2, count, layout.num_kv_heads, layout.block_size) for count in counts]
        try:
            self.layers = [_reserve((*shape[:3], shape[3] * layout.head_dim), layout.dtype, device) for shape in shapes]
            self.scales = [  # [2, num_blocks, num_kv_heads, block_size], a tensor a layer; none: not quantized
                _reserve(shape, _SCALE, device) for shape in shapes * layout.is_quantized
            ]
        except (RuntimeError, MemoryError) as exc:  # torch's for a lack of memory on a GPU is the first
            size = sum(counts) * layout.block_size * layout.token_bytes
            raise ModelError(
                f"{size} bytes for the KV cache cannot be had on {device}: lower kv_cache_memory (--kv-cache-memory)"
            ) from exc

    def copy_blocks(self, copies: Sequence[BlockCopy], window_copies: Sequence[BlockCopy] = ()) -> None:
        """Copy blocks of every layer at once: a block that is both source and target is read first.

        `window_copies` are for the layers that have blocks of windows.
        """
        for is_windowed, made in ((False, copies), (True, window_copies)):
            self._copy([layer for layer, each in enumerate(self.windowed) if each is is_windowed], made)

    def _copy(self, layers: Sequence[int], copies: Sequence[BlockCopy]) -> None:
        if layers and copies:
            device, layout = self.layers[layers[0]].device, self.layout
            sources, targets, counts = torch.tensor(copies, device=device).unbind(1)
            places = torch.stack(layout.places()).flatten(1).to(device)
            tokens = places.argsort(dim=1) // layout.head_dim  # [2, block_size * head_dim], of the elements
            behind = (tokens[:, None] >= counts[:, None]).unsqueeze(2)
            behind_scales = (torch.arange(layout.block_size, device=device) >= counts[:, None]).unsqueeze(1)
            for layer in layers:
                elements = self.layers[layer]
                elements.index_copy_(1, targets, elements.index_select(1, sources).masked_fill_(behind, 0))
                for scales in self.scales[layer : layer + 1]:
                    scales.index_copy_(1, targets, scales.index_select(1, sources).masked_fill_(behind_scales, 0))


def _reserve(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return reserve(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def quantized(heads: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest integers of each head [..., head_dim] by its largest magnitude, and their scales [...].

    The scale of a head whose numbers are not all finite is nan.
    """
    most = heads.float().abs().amax(dim=-1)
    is_finite = most.isfinite()
    factors = torch.where(is_finite & (most > _LEAST), _MOST / most, 0.0)
    steps = heads.double() * factors.double().unsqueeze(-1)  # exact products, as of a fused multiplication and addition
    integers = torch.where(is_finite.unsqueeze(-1), steps, 0.0).round_().to(torch.int8)
    return integers, torch.where(is_finite, most / _MOST, math.nan)


def dequantized(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of integers [..., head_dim] and their scales [...]."""
    return torch.mul(integers, scales.unsqueeze(-1), out=torch.empty_like(integers, dtype=dtype))


class CacheSizes(NamedTuple):
    """How many blocks and state slots the memory holds."""

    num_blocks: int
    num_slots: int
    windows: Windows


class BlockBytes(NamedTuple):
    """The bytes of a block in all layers of both kinds."""

    full: int  # of those that see the whole context
    windowed: int  # of those with blocks of windows


def size_caches(
    config: WorkerConfig,
    model: TextConfig,
    per_block: BlockBytes,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
    weights: int,
    num_reserved: int = 0,
) -> CacheSizes:
    """Return how many blocks and state slots the memory holds beside `weights` bytes. Raises ModelError for none.

    `window`: the tokens that are seen in layers with blocks of windows; 0: there are no such layers. Beside the blocks
    the memory holds `num_reserved` more, which no sequence gets.

    Slots are for all sequences of a step, as many states that the prefix cache keeps, and padding, if these take no
    more than half of the memory.
    """
    per_slot = sum(math.prod(part.shape) * dtype_of(part, dtype).itemsize for part in model.state_parts)
    most_slots = 2 * config.max_num_seqs + 1 if per_slot else 0
    if config.kv_blocks is not None:
        num_slots = most_slots if config.state_slots is None else config.state_slots
        most = config.kv_blocks if config.window_blocks is None else config.window_blocks
        return CacheSizes(config.kv_blocks, num_slots, _windows(config, window, most))
    per_block_of_both = sum(per_block)
    memory = config.kv_cache_memory
    if memory is None:
        on_cuda = device.type == "cuda"
        memory = _free_on_cuda(config, device, weights, per_block_of_both) if on_cuda else _free_on_cpu()
    num_slots = max(2, min(most_slots, memory // 2 // per_slot)) if per_slot else 0
    if memory < num_slots * per_slot + (1 + num_reserved) * per_block_of_both:
        states = f", and two state slots, which take {2 * per_slot} bytes" if per_slot else ""
        padding = ", and another for padding (without --cuda-graphs none)" if num_reserved else ""
        raise ModelError(
            f"kv_cache_memory (--kv-cache-memory) is too small: {memory} bytes hold no block "
            f"of {config.block_size} tokens, which takes {per_block_of_both} bytes{padding}{states}"
        )
    num_blocks = (memory - num_slots * per_slot) // per_block_of_both - num_reserved
    windows = _windows(config, window, num_blocks)
    if windows and not per_block.full:
        num_blocks = max(num_blocks, _blocks_without_layers(config, model, windows))
    elif windows and windows.num_blocks < num_blocks:
        num_blocks = (memory - windows.num_blocks * per_block.windowed) // per_block.full - num_reserved
    return CacheSizes(num_blocks, num_slots, windows)


def _windows(config: WorkerConfig, window: int, most: int) -> Windows:
    """Blocks of windows for all sequences of a step, but no more than `most`."""
    if not window:
        return NO_WINDOWS
    size = config.block_size
    in_windows = config.max_num_seqs * (2 + -(-window // size))  # of which the first and the last are seen in part
    in_step = -(-(config.max_num_batched_tokens + MAX_FORCED) // size)
    return Windows(window, min(most, in_windows + in_step))


def _blocks_without_layers(config: WorkerConfig, model: TextConfig, windows: Windows) -> int:
    """Where all layers have windows the other blocks take no memory: enough of them for all windows' contexts.

    None, where the windows do not hold a sequence and a step: then a sequence is as long as they are.
    """
    size = config.block_size
    least = 2 + -(-(windows.size + config.max_num_batched_tokens + MAX_FORCED) // size)
    context = min(model.max_position_embeddings, config.max_model_len or model.max_position_embeddings)
    num_sequences = max(config.max_num_seqs, windows.num_blocks * size // windows.size)
    return num_sequences * -(-context // size) if windows.num_blocks >= least else 0


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
