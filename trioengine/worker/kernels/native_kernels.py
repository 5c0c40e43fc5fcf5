"""The native kernels: calls into the library that is compiled from C++ for a model's shape and layers."""

from __future__ import annotations

import ctypes
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.compiler import load_library
from trioengine.worker.kernels import (
    Activation,
    Attention,
    Convolution,
    Decoder,
    DecoderWeights,
    Experts,
    GatedDelta,
    Residual,
    RMSNorm,
    RotaryTable,
    Routing,
    native_decoder,
    native_experts,
    products,
)
from trioengine.worker.kernels.addresses import (
    ACTIVATIONS,
    address,
    convolution_address,
    delta_address,
    norm_address,
    residual_address,
    rotary_address,
    state_rows_address,
)
from trioengine.worker.kernels.batch import ForwardBatch, StateRows
from trioengine.worker.kernels.best_tokens import Best
from trioengine.worker.kernels.decoder import LayerByLayer
from trioengine.worker.kernels.decoder import has_states as has_state
from trioengine.worker.kernels.kv_cache import KVCache, KVOrder
from trioengine.worker.kernels.native_attention import (
    LayerCacheAddress,
    NativeAttention,
    cache_addresses,
)
from trioengine.worker.kernels.native_decoder import NativeDecoder
from trioengine.worker.kernels.native_experts import routing_address
from trioengine.worker.kernels.products import Products
from trioengine.worker.native_library import SOURCES, library_macros

_ADDRESS, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "add": (_ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _COUNT, _ADDRESS),
    "norm_heads": (_ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS),
    "rotate": (_ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS, _ADDRESS),
    "gate": (_ADDRESS, _ADDRESS, _COUNT, _COUNT),
    "best": (_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS),
    "gated": (_ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS),
    "store": (_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS),
    "attend": (
        *(_ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _COUNT),
        *(_FLOAT, _COUNT, _ADDRESS, _ADDRESS),
    ),
    "shares_segments": (_ADDRESS, _COUNT, _COUNT),
    **products.FUNCTIONS,
    **native_decoder.FUNCTIONS,
}
_OF_STATES: dict[str, tuple[type, ...]] = {
    "convolve": (_ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _ADDRESS),
    "update_delta": (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
}


class NativeKernels:
    """The calls into the library, during which other threads run."""

    name = "native"
    has_window_tables = True
    is_batch_invariant = True  # each row by the same operations, in the order of its columns and its context

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        at_most: str | None = None,
        cache_dtype: torch.dtype | None = None,
        *,
        has_states: bool = True,
        has_experts: bool = True,
    ) -> None:
        """Load the library, compiled now if it never was before. Raises KernelsUnavailable, with the reason.

        `at_most`: the best instructions that the kernels use, of lanes.h; None: this CPU's. `cache_dtype`: the KV
        cache's, `dtype` or int8; None: `dtype`. `has_states`, `has_experts`: whether such layers
        are compiled.
        """
        self.dtype, self.cache_dtype = dtype, cache_dtype or dtype
        self._has_states, self._has_experts = has_states, has_experts
        element, cache_element = (str(each).removeprefix("torch.") for each in (self.dtype, self.cache_dtype))
        macros = library_macros(
            *(num_heads, num_kv_heads, head_dim),
            *(element, cache_element, block_size),
            has_states=has_states,
            has_experts=has_experts,
        )
        if at_most is not None:
            macros["AT_MOST"] = at_most
        self.group_size, self.tile_size = int(macros["GROUP_SIZE"]), int(macros["TILE_SIZE"])
        functions = _FUNCTIONS | (_OF_STATES if has_states else {}) | (native_experts.FUNCTIONS if has_experts else {})
        self.native = load_library(SOURCES, macros, tuple(functions))
        for name, types in functions.items():
            function = getattr(self.native, name)
            function.argtypes, function.restype = types, None
        for number in (self.native.sums_size, self.native.cache_order):
            number.argtypes, number.restype = (), _COUNT
        self.native.shares_segments.restype = self.native.decode.restype = _COUNT
        self.cache_order, self.sums_size = KVOrder(self.native.cache_order()), int(self.native.sums_size())
        self.products = Products(self.native, dtype)
        self._caches: WeakKeyDictionary[KVCache, ctypes.Array[LayerCacheAddress]] = WeakKeyDictionary()

    def add(self, hidden: Tensor, delta: Tensor, residual: Residual) -> Tensor:
        rows, size = hidden.shape
        result = torch.empty_like(delta)
        at = ctypes.byref(residual_address(residual))
        self.native.add(address(hidden, torch.float32), address(delta, self.dtype), at, rows, size, result.data_ptr())
        return result

    def norm_heads_(self, heads: Tensor, start: int, stop: int, norm: RMSNorm) -> None:
        tokens, all_heads, head_dim = heads.shape
        first = address(heads, self.dtype) + start * head_dim * heads.itemsize
        self.native.norm_heads(first, tokens, all_heads, stop - start, ctypes.byref(norm_address(norm)))

    def rotate_(self, heads: Tensor, count: int, rotary: RotaryTable, positions: Tensor) -> None:
        tokens, all_heads, head_dim = heads.shape
        if rotary.size > head_dim:
            raise InvariantError(f"a rotation of {rotary.size} elements for heads of {head_dim}")
        at = ctypes.byref(rotary_address(rotary, self.dtype))
        self.native.rotate(address(heads, self.dtype), tokens, all_heads, count, at, address(positions, torch.int64))

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, size = gate_up.shape
        result = gate_up.new_empty((rows, size // 2))
        at = address(gate_up, self.dtype)
        self.native.gated(at, rows, size // 2, ACTIVATIONS[activation], result.data_ptr())
        return result

    def convolve(self, inputs: Tensor, convolution: Convolution, states: Tensor, rows: StateRows) -> Tensor:
        result = inputs.new_empty((len(inputs), convolution.weight.shape[1]))
        self.native.convolve(
            ctypes.byref(convolution_address(convolution)),
            address(inputs, self.dtype),
            len(inputs),
            address(states, self.dtype),
            ctypes.byref(state_rows_address(rows)),
            result.data_ptr(),
        )
        return result

    def route(self, scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        rows, experts = scores.shape
        chosen = torch.empty((rows, routing.num_used), dtype=torch.int64)
        weights = torch.empty((rows, routing.num_used), dtype=torch.float32)
        how = ctypes.byref(routing_address(routing, experts))
        self.native.route(address(scores, self.dtype), rows, how, chosen.data_ptr(), weights.data_ptr())
        return chosen, weights

    def mix(self, results: Tensor, weights: Tensor) -> Tensor:
        rows, chosen, size = results.shape
        mixed, places = results.new_empty((rows, size)), torch.arange(rows * chosen)
        from_, by = address(results, self.dtype), address(weights, torch.float32)
        self.native.mix(from_, places.data_ptr(), by, rows, chosen, size, mixed.data_ptr())
        return mixed

    def update_delta(
        self, inputs: Tensor, delta: GatedDelta, kept: Tensor, matrices: Tensor, rows: StateRows
    ) -> Tensor:
        result = inputs.new_empty((len(inputs), delta.num_value_heads * delta.value_dim))
        self.native.update_delta(
            ctypes.byref(delta_address(delta)),
            address(inputs, self.dtype),
            address(kept, self.dtype),
            address(matrices, torch.float32),
            ctypes.byref(state_rows_address(rows)),
            result.data_ptr(),
        )
        return result

    def gate_(self, results: Tensor, gates: Tensor) -> None:
        self.native.gate(address(results, self.dtype), address(gates, self.dtype), *results.shape)

    def best(self, logits: Tensor) -> Best:
        rows, size = logits.shape
        best = Best(torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64))
        self.native.best(address(logits, torch.float32), rows, size, best.logits.data_ptr(), best.token_ids.data_ptr())
        return best

    def attention(self, batch: ForwardBatch, cache: KVCache) -> Attention:
        caches = self._caches.get(cache)
        if caches is None:
            caches = self._caches[cache] = cache_addresses(cache, self.cache_dtype, self.cache_order)
        return NativeAttention(self, batch, cache, caches)

    def decoder(self, config: TextConfig, weights: DecoderWeights) -> Decoder:
        for layer in weights.layers:
            if has_state(layer) and not self._has_states:
                raise InvariantError("a layer with a state, for kernels that were compiled without")
            if isinstance(layer.mlp, Experts) and not self._has_experts:
                raise InvariantError("a layer with experts, for kernels that were compiled without")
        return NativeDecoder(config, weights, LayerByLayer(self, config, weights))
