"""A decoder, one operation after the other: the reference."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import embedding

from trioengine.core.errors import InvariantError
from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import (
    Attention,
    Computed,
    DecoderLayer,
    DecoderWeights,
    Experts,
    GatedMLP,
    Kernels,
    Residual,
)
from trioengine.worker.kernels.adapters import AdaptedRows
from trioengine.worker.kernels.batch import ForwardBatch, StateRows
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.kernels.state_cache import StateCache


class LayerByLayer:
    """Calls the kernels one by one. The residual stream is kept in float32, whatever the dtype of the weights."""

    def __init__(self, kernels: Kernels, config: TextConfig, weights: DecoderWeights) -> None:
        self._kernels, self._config, self._weights = kernels, config, weights

    def forward(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Tensor:
        kernels, weights = self._kernels, self._weights
        embeddings = embed(weights, batch)
        kv_layers, parts = count(), iter(states.parts if states is not None else ())
        adapters = batch.adapters
        hidden = torch.zeros_like(embeddings, dtype=torch.float32)
        normed = kernels.add(hidden, embeddings, Residual(weights.layers[0].attention_norm))
        for layer, (after_attention, after_mlp) in zip(weights.layers, weights.residuals(), strict=True):
            inputs = _multiply(layer.qkv, normed, adapters)
            if has_states(layer):
                mixed = self._with_states(layer, inputs, batch, parts)
            else:
                mixed = self._attend(next(kv_layers), layer, inputs, batch, attention)
            if layer is weights.layers[-1]:  # its other rows are needed for their keys, values and states only
                hidden, mixed = (rows.index_select(0, batch.output_rows) for rows in (hidden, mixed))
                adapters = None if adapters is None else adapters.select(batch.output_rows)
            normed = kernels.add(hidden, _multiply(layer.output, mixed, adapters), after_attention)
            normed = kernels.add(hidden, self._compute_mlp(layer.mlp, normed, adapters), after_mlp)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        return logits(self._weights, hidden)

    def compute(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Computed:
        head_of(self._weights)  # before keys and values are stored
        found = self.logits(self.forward(batch, attention, states))
        return Computed(found, self._kernels.best(found))

    def _compute_mlp(self, mlp: GatedMLP | Experts, x: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """`adapters` do not change experts."""
        if isinstance(mlp, Experts):
            return self._mix(mlp, x)
        gated = self._kernels.gated(_multiply(mlp.gate_up, x, adapters), self._weights.activation)
        return _multiply(mlp.down, gated, adapters)

    def _mix(self, experts: Experts, x: Tensor) -> Tensor:
        """The rows of each expert are computed together."""
        chosen, weights = self._kernels.route(experts.router(x), experts.routing)
        results = x.new_empty((*chosen.shape, x.shape[1]))
        for expert in sorted(set(chosen.flatten().tolist())):
            places = chosen == expert
            results[places] = self._compute_mlp(experts.mlps[expert], x[places.any(dim=1)])
        return self._kernels.mix(results, weights)

    def _with_states(self, layer: DecoderLayer, inputs: Tensor, batch: ForwardBatch, parts: Iterator[Tensor]) -> Tensor:
        """`parts`: of the states, from the layer's on."""
        rows = state_rows(batch)
        if layer.delta is not None:
            return self._kernels.update_delta(inputs, layer.delta, next(parts), next(parts), rows)
        if layer.convolution is not None:
            return self._kernels.convolve(inputs, layer.convolution, next(parts), rows)
        raise InvariantError("a layer of attention has no states")

    def _attend(
        self, index: int, layer: DecoderLayer, qkv: Tensor, batch: ForwardBatch, attention: Attention
    ) -> Tensor:
        """`index`: among the layers with keys and values."""
        config, kernels = self._config, self._kernels
        queries, both = config.num_heads, config.num_heads + config.num_kv_heads
        qkv, gates = self._separated(layer, qkv)
        heads = qkv.view(-1, both + config.num_kv_heads, config.head_dim)
        if layer.query_norm is not None:
            kernels.norm_heads_(heads, 0, queries, layer.query_norm)
        if layer.key_norm is not None:
            kernels.norm_heads_(heads, queries, both, layer.key_norm)
        if layer.rotary is not None:
            kernels.rotate_(heads, both, layer.rotary, batch.positions)
        results = attention.forward(index, heads, self._weights.attention_scale, layer.window)
        if gates is not None:
            kernels.gate_(results, gates)
        return results

    def _separated(self, layer: DecoderLayer, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values; and the gates that lie behind each head of queries, if there are any."""
        if not layer.has_gates:
            return qkv, None
        queries, size = self._config.num_heads, self._config.head_dim
        pairs = qkv[:, : 2 * queries * size].view(-1, queries, 2, size)
        keys_values = qkv[:, 2 * queries * size :]
        return torch.cat([pairs[:, :, 0].flatten(1), keys_values], dim=1), pairs[:, :, 1].flatten(1)


def embed(weights: DecoderWeights, batch: ForwardBatch) -> Tensor:
    """The embeddings [num_tokens, hidden_size] of the batch."""
    embeddings = embedding(batch.token_ids, weights.embedding)
    if weights.embedding_scale != 1.0:
        embeddings.mul_(weights.embedding_scale)
    if batch.embeddings is not None:
        embeddings.index_copy_(0, batch.embeddings.rows, batch.embeddings.values)
    return embeddings


def logits(weights: DecoderWeights, hidden: Tensor) -> Tensor:
    """The logits of normalized hidden states. Raises InvariantError for an embedding model."""
    products = head_of(weights)(hidden)
    return products if weights.logits_scaling == 1.0 else products.div_(weights.logits_scaling)


def head_of(weights: DecoderWeights) -> Linear:
    """Raises InvariantError for an embedding model."""
    if weights.head is None:
        raise InvariantError("logits of an embedding model, which has no head")
    return weights.head


def _multiply(linear: Linear, x: Tensor, adapters: AdaptedRows | None) -> Tensor:
    return linear(x) if adapters is None else adapters.multiply(linear, x)


def has_states(layer: DecoderLayer) -> bool:
    """Whether the layer has states in place of keys and values."""
    return layer.convolution is not None or layer.delta is not None


def state_rows(batch: ForwardBatch) -> StateRows:
    """The slots of the batch's sequences. Raises InvariantError if they have none."""
    if batch.states is None:
        raise InvariantError("a step of a model with states, whose sequences have no slots for them")
    return batch.states
