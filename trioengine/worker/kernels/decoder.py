"""A decoder's layers, one operation after the other: the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from trioengine.hub.model_config import TextConfig
from trioengine.worker.kernels import Attention, DecoderLayer, DecoderWeights, Kernels, Residual
from trioengine.worker.kernels.batch import ForwardBatch


class LayerByLayer:
    """Calls the kernels one by one. The residual stream is kept in float32, whatever the dtype of the weights."""

    def __init__(self, kernels: Kernels, config: TextConfig, weights: DecoderWeights) -> None:
        self._kernels, self._config, self._weights = kernels, config, weights

    def forward(self, embeddings: Tensor, batch: ForwardBatch, attention: Attention) -> Tensor:
        kernels, weights = self._kernels, self._weights
        hidden = torch.zeros_like(embeddings, dtype=torch.float32)
        normed = kernels.add(hidden, embeddings, Residual(weights.layers[0].attention_norm))
        for index, (layer, residuals) in enumerate(zip(weights.layers, weights.residuals(), strict=True)):
            after_attention, after_mlp = residuals
            attended = self._attend(index, layer, normed, batch, attention)
            if layer is weights.layers[-1]:  # its other rows are needed for their keys and values only
                hidden, attended = (rows.index_select(0, batch.output_rows) for rows in (hidden, attended))
            gate_up = layer.gate_up(kernels.add(hidden, layer.output(attended), after_attention))
            normed = kernels.add(hidden, layer.down(kernels.gated(gate_up, weights.activation)), after_mlp)
        return normed

    def _attend(
        self, index: int, layer: DecoderLayer, hidden: Tensor, batch: ForwardBatch, attention: Attention
    ) -> Tensor:
        config, kernels = self._config, self._kernels
        queries, both = config.num_heads, config.num_heads + config.num_kv_heads
        heads = layer.qkv(hidden).view(-1, both + config.num_kv_heads, config.head_dim)
        if layer.query_norm is not None:
            kernels.norm_heads_(heads, 0, queries, layer.query_norm)
        if layer.key_norm is not None:
            kernels.norm_heads_(heads, queries, both, layer.key_norm)
        if layer.rotary is not None:
            kernels.rotate_(heads, both, layer.rotary, batch.positions)
        return attention.forward(index, heads, self._weights.attention_scale, layer.window)
