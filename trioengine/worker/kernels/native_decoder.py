"""All of a decoder in one call a step (decoder.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import Attention, Computed, DecoderLayer, DecoderWeights, GatedMLP, Residual
from trioengine.worker.kernels.addresses import (
    ACTIVATIONS,
    ConvolutionAddress,
    DeltaAddress,
    NormAddress,
    ResidualAddress,
    RotaryAddress,
    StateRowsAddress,
    address,
    array_address,
    convolution_address,
    delta_address,
    norm_address,
    residual_address,
    rotary_address,
    state_rows_address,
    window_size,
)
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.decoder import LayerByLayer, embed, has_states, head_of, logits, state_rows
from trioengine.worker.kernels.native_attention import NativeAttention
from trioengine.worker.kernels.native_experts import ExpertsAddress, NativeExperts, RoutesAddress, reserve_routes
from trioengine.worker.kernels.products import ROW_GROUP, InputsAddress, NativeLinear, Profile, WeightAddress
from trioengine.worker.kernels.state_cache import StateCache

_WEIGHTS = ("qkv", "output", "gate_up", "down")
_ADDRESS, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_OF_LAYERS = ("norms", "qkv", "attention", "convolution", "delta", "output", "gate_up", "activation", "down")
_OF_EXPERTS = ("router", "routing")
OPERATIONS = (*_OF_LAYERS, "head", "best", *_OF_EXPERTS)  # as decoder.h's; a model has some of them
FUNCTIONS: Mapping[str, tuple[type, ...]] = {"decode": (_ADDRESS, _ADDRESS, _ADDRESS)}


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", WeightAddress),
        ("output", WeightAddress),
        ("gate_up", WeightAddress),
        ("down", WeightAddress),
        ("experts", ExpertsAddress),
        ("query_norm", NormAddress),
        ("key_norm", NormAddress),
        ("rotary", RotaryAddress),
        ("window", _COUNT),
        ("has_gates", _COUNT),
        ("convolution", ConvolutionAddress),
        ("delta", DeltaAddress),
        ("after_attention", ResidualAddress),
        ("after_mlp", ResidualAddress),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("embedding", _ADDRESS),
        ("vocabulary", _COUNT),
        ("embedding_scale", _FLOAT),
        ("layers", _ADDRESS),
        ("num_layers", _COUNT),
        ("kv_heads", _COUNT),
        ("norm", NormAddress),
        ("scale", _FLOAT),
        ("activation", _COUNT),
        ("head", WeightAddress),
        ("logits_scaling", _FLOAT),
    )


class _Logits(ctypes.Structure):
    _fields_ = (("all", _ADDRESS), ("best", _ADDRESS), ("best_ids", _ADDRESS))


class _Step(ctypes.Structure):
    _fields_ = (
        ("tokens", _COUNT),
        ("token_ids", _ADDRESS),
        ("embeddings", _ADDRESS),
        ("positions", _ADDRESS),
        ("slots", _ADDRESS),
        ("window_slots", _ADDRESS),
        ("tiles", _ADDRESS),
        ("num_tiles", _COUNT),
        ("tables", _ADDRESS),
        ("window_tables", _ADDRESS),
        ("width", _COUNT),
        ("caches", _ADDRESS),
        ("states", _ADDRESS),
        ("state_rows", StateRowsAddress),
        ("output_rows", _ADDRESS),
        ("outputs", _COUNT),
        ("out", _ADDRESS),
        ("logits", _Logits),
    )


class _Scratch(ctypes.Structure):
    _fields_ = (
        ("inputs", InputsAddress),
        ("hidden", _ADDRESS),
        ("selected", _ADDRESS),
        ("narrow", _ADDRESS),
        ("delta", _ADDRESS),
        ("wide", _ADDRESS),
        ("mixed", _ADDRESS),
        ("routes", RoutesAddress),
        ("sums", _ADDRESS),
        ("times", _ADDRESS),
        ("rows", _COUNT),
        ("columns", _COUNT),
        ("is_own", _COUNT),
    )


class _Products:
    """The products of a layer."""

    def __init__(self, layer: DecoderLayer) -> None:
        """`layer` has native linear layers only."""
        products = {"qkv": layer.qkv, "output": layer.output}
        self.experts: NativeExperts | None = None
        if isinstance(layer.mlp, GatedMLP):
            products |= {"gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
        else:
            products["router"] = layer.mlp.router
            self.experts = NativeExperts(layer.mlp)
        self.of_all = {name: cast("NativeLinear", product) for name, product in products.items()}  # of all rows

    @property
    def addresses(self) -> tuple[WeightAddress | ExpertsAddress, ...]:
        """As decoder.h's Layer begins."""
        weights = (self.of_all[name].address if name in self.of_all else WeightAddress() for name in _WEIGHTS)
        return *weights, ExpertsAddress() if self.experts is None else self.experts.address

    def rows(self, tokens: int, outputs: int) -> Iterator[tuple[str, NativeLinear, int]]:
        """The products of the last step, with their names and rows: all tokens' in the first product only."""
        for name, product in self.of_all.items():
            yield name, product, tokens if name == "qkv" else outputs
        if self.experts is not None:
            for name, products in (("gate_up", self.experts.gate_up), ("down", self.experts.down)):
                for product, rows in self.experts.loaded(products):
                    yield name, product, rows


class _Widths:
    """The most columns behind a product, and before it."""

    def __init__(self, products: Sequence[NativeLinear]) -> None:
        self.outputs = max((product.out_features for product in products), default=0)
        self.inputs = max((product.in_features for product in products), default=0)


def _state_dtypes(layer: DecoderLayer, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of the parts of a layer's state, in a model of `dtype`."""
    if layer.delta is not None:
        return dtype, torch.float32
    return () if layer.convolution is None else (dtype,)


class NativeDecoder:
    """The results have the same bits as LayerByLayer's. For one thread at a time."""

    def __init__(self, config: TextConfig, weights: DecoderWeights, layer_by_layer: LayerByLayer) -> None:
        """`weights` has native linear layers only, all of the same Products; `layer_by_layer` is for adapters."""
        self._weights = weights  # the memory at the addresses
        self._layer_by_layer = layer_by_layer
        self._layer_products = products = [_Products(layer) for layer in weights.layers]
        self._products = products[0].of_all["qkv"].products
        self._head = cast("NativeLinear | None", weights.head)
        self._head_dim = config.head_dim
        self._check_widths(config.hidden_size)
        self._num_kv_layers = sum(not has_states(layer) for layer in weights.layers)
        self._state_dtypes = [dtype for layer in weights.layers for dtype in _state_dtypes(layer, self._products.dtype)]
        self._layers = (_Layer * len(products))(*map(self._layer, weights.layers, products, weights.residuals()))
        self._decoder = _Decoder(
            address(weights.embedding, self._products.dtype),
            len(weights.embedding),
            weights.embedding_scale,
            ctypes.addressof(self._layers),
            len(products),
            config.num_kv_heads,
            norm_address(weights.layers[0].attention_norm),
            weights.attention_scale,
            ACTIVATIONS[weights.activation],
            WeightAddress() if self._head is None else self._head.address,
            weights.logits_scaling,
        )
        self._size = config.hidden_size
        self._room, self._room_tokens, self._room_version = _Scratch(), 0, -1  # of the last steps
        self._experts = [layer.experts for layer in products if layer.experts is not None]
        self._of_all = _Widths([product for layer in products for product in layer.of_all.values()])
        self._of_experts = _Widths([product for each in self._experts for product in (*each.gate_up, *each.down)])

    def forward(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Tensor:
        if batch.adapters is not None:
            return self._layer_by_layer.forward(batch, attention, states)
        hidden = torch.empty((len(batch.output_rows), self._size), dtype=self._products.dtype)
        self._decode(batch, attention, states, hidden.data_ptr(), _Logits())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return logits(self._weights, hidden)

    def compute(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Computed:
        if batch.adapters is not None:
            return self._layer_by_layer.compute(batch, attention, states)
        head = cast("NativeLinear", head_of(self._weights))
        computed = self._products.results.take(len(batch.output_rows), head.out_features)
        best = computed.best
        room = _Logits(computed.logits.data_ptr(), best.logits.data_ptr(), best.token_ids.data_ptr())
        self._decode(batch, attention, states, None, room)
        return computed

    def _decode(
        self, batch: ForwardBatch, attention: Attention, states: StateCache | None, out: int | None, room: _Logits
    ) -> None:
        """Compute to `out`, the address of hidden states of the output rows, or, where it is None, to `room`."""
        if not isinstance(attention, NativeAttention):
            raise InvariantError(f"the native decoder got another attention: {attention!r}")
        tokens, rows, dtype = len(batch.token_ids), batch.output_rows, self._products.dtype
        if len(rows) > tokens:
            raise InvariantError(f"a batch of {tokens} tokens has {len(rows)} output rows")
        if len(attention.caches) != self._num_kv_layers:
            raise InvariantError(f"a KV cache of {len(attention.caches)} layers for {self._num_kv_layers}")
        state_addresses = self._state_addresses(states)
        embeddings = None if batch.embeddings is None else embed(self._weights, batch)
        step = _Step(
            tokens,
            address(batch.token_ids, torch.int64),
            None if embeddings is None else address(embeddings, dtype),
            address(batch.positions, torch.int64),
            address(attention.slots, torch.int64),
            address(attention.window_slots, torch.int64),
            attention.tiles_address,
            attention.num_tiles,
            array_address(attention.tables),
            array_address(attention.window_tables),
            attention.width,
            ctypes.addressof(attention.caches),
            ctypes.addressof(state_addresses),
            state_rows_address(state_rows(batch) if self._state_dtypes else None),
            address(rows, torch.int64),
            len(rows),
            out,
            room,
        )
        profile = self._products.profile
        times = None if profile is None else (_COUNT * len(OPERATIONS))()
        scratch = self._reserve(tokens, attention, None if times is None else ctypes.addressof(times))
        if not self._products.native.decode(ctypes.byref(self._decoder), ctypes.byref(step), ctypes.byref(scratch)):
            raise InvariantError(f"a token id outside of the {self._decoder.vocabulary} of the embedding")
        if profile is not None and times is not None:
            self._add_times(profile, times, tokens, len(rows))

    def _state_addresses(self, states: StateCache | None) -> ctypes.Array[ctypes.c_void_p]:
        """The parts of the states, layer by layer."""
        parts, dtypes = [] if states is None else states.parts, self._state_dtypes
        if len(parts) != len(dtypes):
            raise InvariantError(f"{len(parts)} parts of states for {len(dtypes)}")
        return (_ADDRESS * len(parts))(*map(address, parts, dtypes))

    def _check_widths(self, size: int) -> None:
        """C++ takes hidden states for as wide as the first product's inputs."""
        widths = [self._layer_products[0].of_all["qkv"].in_features, self._weights.embedding.shape[1]]
        widths += [] if self._head is None else [self._head.in_features]
        if widths != [size] * len(widths):
            raise InvariantError(f"first product, embedding and head of {widths} columns for hidden states of {size}")

    def _layer(self, layer: DecoderLayer, products: _Products, residuals: tuple[Residual, Residual]) -> _Layer:
        if layer.rotary is not None and layer.rotary.size > self._head_dim:
            raise InvariantError(f"a rotation of {layer.rotary.size} elements for heads of {self._head_dim}")
        if layer.has_gates and layer.query_norm is not None and len(layer.query_norm.weight) > self._head_dim:
            raise InvariantError("a norm of all queries together, between which gates lie")
        return _Layer(
            *products.addresses,
            norm_address(layer.query_norm),
            norm_address(layer.key_norm),
            rotary_address(layer.rotary, self._products.dtype),
            window_size(layer.window),
            layer.has_gates,
            convolution_address(layer.convolution),
            delta_address(layer.delta),
            *map(residual_address, residuals),
        )

    def _add_times(self, profile: Profile, times: Iterable[int], tokens: int, outputs: int) -> None:
        """`times`: nanoseconds of each operation. The last layer computes only its first product for all tokens."""
        computed: dict[str, list[tuple[NativeLinear, int]]] = {}
        for layer in self._layer_products:
            rows = outputs if layer is self._layer_products[-1] else tokens
            for name, product, count in layer.rows(tokens, rows):
                computed.setdefault(name, []).append((product, count))
        if self._head is not None:
            computed["head"] = [(self._head, outputs)]
        for name, nanoseconds in zip(OPERATIONS, times, strict=True):
            if nanoseconds:
                profile.add_product(name, nanoseconds / 1e9, computed.get(name, ()))

    def _reserve(self, tokens: int, attention: NativeAttention, times: int | None) -> _Scratch:
        """Room for a step with so many tokens, and the address of its times: the last step's, if it is large enough."""
        sums = attention.reserve_sums()
        if tokens > self._room_tokens or self._room_version != self._products.scratch.version:
            self._room, self._room_tokens = self._make_room(tokens), tokens
            self._room_version = self._products.scratch.version
        self._room.sums, self._room.times = sums, times
        return self._room

    def _make_room(self, tokens: int) -> _Scratch:
        """Also for threads' own rows, of as many threads as there are now; with more, steps have none."""
        scratch, dtype = self._products.scratch, self._products.dtype
        places = max((each.num_places(tokens) for each in self._experts), default=0)
        wide = max(tokens * self._of_all.outputs, places * self._of_experts.outputs)
        narrow = max(tokens * self._of_all.inputs, places * self._of_experts.inputs)
        rows = 0 if self._experts else torch.get_num_threads() * ROW_GROUP
        columns = max(self._of_all.inputs, self._of_experts.inputs)
        return _Scratch(
            scratch.reserve_inputs(max(tokens, places, rows), columns),
            scratch.reserve("hidden", max(tokens * self._size, rows * columns), torch.float32),
            scratch.reserve("selected", max(tokens * self._size, rows * columns), torch.float32),
            scratch.reserve("narrow", max(narrow, rows * columns), dtype),
            scratch.reserve("delta", tokens * self._size, dtype),
            scratch.reserve("wide", wide, dtype),
            scratch.reserve("mixed", tokens * self._of_all.inputs, dtype),
            reserve_routes(scratch, self._experts, tokens) if self._experts else RoutesAddress(),
            rows=rows,
            columns=columns,
        )
