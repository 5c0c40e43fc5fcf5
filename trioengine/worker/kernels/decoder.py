"""A decoder's layers, one operation after the other: the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import Attention, DecoderLayer, DecoderWeights, Kernels
from trioengine.worker.kernels.batch import ForwardBatch


class LayerByLayer:
    """Calls the kernels one by one. The residual stream is kept in float32, whatever the dtype of the weights."""

    def __init__(self, kernels: Kernels, config: TextConfig, weights: DecoderWeights) -> None:
        self._kernels, self._config, self._weights = kernels, config, weights

    def forward(self, embeddings: Tensor, batch: ForwardBatch, attention: Attention) -> Tensor:
        kernels, layers = self._kernels, self._weights.layers
        delta = embeddings
        hidden = torch.zeros_like(delta, dtype=torch.float32)
        for index, layer in enumerate(layers):
            attended = self._attend(index, layer, kernels.add_norm(hidden, delta, layer.input_norm), batch, attention)
            if layer is layers[-1]:  # the last layer's other rows are needed for their keys and values only
                hidden, attended = (rows.index_select(0, batch.output_rows) for rows in (hidden, attended))
            delta = layer.output(attended)
            gate_up = layer.gate_up(kernels.add_norm(hidden, delta, layer.post_attention_norm))
            delta = layer.down(kernels.silu_and_multiply(gate_up))
        return kernels.add_norm(hidden, delta, self._weights.norm)

    def _attend(
        self, index: int, layer: DecoderLayer, hidden: Tensor, batch: ForwardBatch, attention: Attention
    ) -> Tensor:
        config = self._config
        rotated = config.num_heads + config.num_kv_heads
        heads = layer.qkv(hidden).view(-1, rotated + config.num_kv_heads, config.head_dim)
        self._kernels.rotate_(heads, rotated, self._weights.rotary, batch.positions)
        return attention.forward(index, heads)
