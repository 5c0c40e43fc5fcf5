"""Attention by attention.cpp, and the layout of its batch, which the decoder shares."""

from __future__ import annotations

import ctypes
from array import array
from typing import Protocol

import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels.addresses import address, array_address, window_size
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.kv_cache import KVCache, KVOrder
from trioengine.worker.kernels.products import Products
from trioengine.worker.native_library import SEGMENT_SIZE

_MOST_SUMS = 64 << 20  # bytes of the segments' sums
_TILE_FIELDS = 4  # of tile.h's Tile, int64


class Library(Protocol):
    """The library that has the kernels, and its shape."""

    native: ctypes.CDLL
    dtype: torch.dtype
    group_size: int  # query heads that share keys and values
    tile_size: int  # tokens of queries at a time
    sums_size: int  # bytes of the sums of a tile over a segment
    products: Products  # whose scratch is used


class LayerCacheAddress(ctypes.Structure):
    """cache.h's LayerCache."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
        ("is_windowed", ctypes.c_int64),
    )


class NativeAttention:
    """One step's attention to the blocks of the KV cache, a tile of queries at a time."""

    def __init__(
        self, library: Library, batch: ForwardBatch, cache: KVCache, caches: ctypes.Array[LayerCacheAddress]
    ) -> None:
        """`caches`: `cache_addresses` of the cache."""
        self._library = library
        self._cache = cache  # the memory at the addresses
        self._num_kv_heads = cache.layout.num_kv_heads
        self.caches = caches
        self.slots, self.tables, self.width = batch.slot_mapping, batch.block_tables, batch.block_tables.shape[1]
        in_windows = batch.in_windows() if any(cache.windowed) else batch
        self.window_slots, self.window_tables = in_windows.slot_mapping, in_windows.block_tables
        contexts = batch.context_lens.tolist()
        self._tiles = _tiles(batch.query_lens.tolist(), contexts, library.tile_size)
        self.tiles_address, self.num_tiles = self._tiles.buffer_info()[0], len(self._tiles) // _TILE_FIELDS
        self._num_segments = -(-max(contexts) // SEGMENT_SIZE)  # of a sequence, at most

    def reserve_sums(self) -> int | None:
        """The address of room for the sums of all segments, if threads share these; or None."""
        library, kv_heads = self._library, self._num_kv_heads
        size = self.num_tiles * self._num_segments * kv_heads * library.sums_size
        if size > _MOST_SUMS or not library.native.shares_segments(self.tiles_address, self.num_tiles, kv_heads):
            return None
        return library.products.scratch.reserve("segment_sums", size, torch.uint8)

    def forward(self, layer: int, heads: Tensor, scale: float, window: int | None = None) -> Tensor:
        library, kv_heads = self._library, self._num_kv_heads
        tokens, _, head_dim = heads.shape
        result = heads.new_empty((tokens, library.group_size * kv_heads * head_dim))
        at, cache = address(heads, library.dtype), ctypes.byref(self.caches[layer])
        is_windowed = self._cache.windowed[layer]
        slots, tables = (self.window_slots, self.window_tables) if is_windowed else (self.slots, self.tables)
        library.native.store(at, tokens, kv_heads, slots.data_ptr(), cache)
        library.native.attend(
            at,
            kv_heads,
            cache,
            array_address(tables),
            self.width,
            self.tiles_address,
            self.num_tiles,
            scale,
            window_size(window),
            self.reserve_sums(),
            result.data_ptr(),
        )
        return result


def cache_addresses(cache: KVCache, dtype: torch.dtype, order: KVOrder) -> ctypes.Array[LayerCacheAddress]:
    """The addresses of every layer, of `dtype` and in that order."""
    if cache.layout.order is not order:
        raise InvariantError(f"a native kernel got a KV cache in the order {cache.layout.order.name}, not {order.name}")
    halves = [[address(half, dtype) for half in layer] for layer in cache.layers]
    scales = [[address(half, torch.float32) for half in layer] for layer in cache.scales] or [[0, 0]] * len(halves)
    layers = zip(halves, scales, cache.windowed, strict=True)
    return (LayerCacheAddress * len(halves))(*(LayerCacheAddress(*a, *b, is_windowed) for a, b, is_windowed in layers))


def _tiles(query_lens: list[int], context_lens: list[int], size: int) -> array[int]:
    """Pieces of at most `size` new tokens of a sequence, as tile.h's Tile.

    An array, because making a tensor takes 100 microseconds more in a step of one token.
    """
    tiles = array("q")
    row = 0
    for sequence, (new, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        for first in range(0, new, size):
            tokens = min(size, new - first)
            tiles.extend((sequence, row + first, tokens, context - new + first + tokens))
        row += new
    return tiles
