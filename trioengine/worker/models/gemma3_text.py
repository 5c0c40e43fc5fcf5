"""Gemma 3: norms before and behind attention and MLP, windows with a rotary table of their own, and GELU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trioengine.hub.rope_config import RopeScaling
from trioengine.worker.kernels import Activation, DecoderLayer, DecoderWeights, RMSNorm
from trioengine.worker.kernels.rotary import inverse_frequencies
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader, LlamaModel
from trioengine.worker.weights.checkpoint import WeightReader


class Gemma3Model(LlamaModel):
    """A Gemma 3 of texts. The weight of each norm is 1 more than the tensor."""

    def read_frequencies(self, weights: WeightReader, max_positions: int) -> Tensor:
        config = self.config
        local = inverse_frequencies(config.local_rope_theta, config.rotary_dim, RopeScaling(), max_positions)
        self.local_rotary = self.rotary_table(local, max_positions)
        return super().read_frequencies(weights, max_positions)

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        window = self.config.windows[index]

        def norm(name: str) -> RMSNorm:
            return add_one(reader.norm(name))

        return DecoderLayer(
            qkv=reader.qkv(),
            output=reader.output(),
            mlp=reader.mlp(),
            attention_norm=norm("input_layernorm"),
            mlp_norm=norm("pre_feedforward_layernorm"),
            attention_output_norm=norm("post_attention_layernorm"),
            mlp_output_norm=norm("post_feedforward_layernorm"),
            query_norm=norm("self_attn.q_norm"),
            key_norm=norm("self_attn.k_norm"),
            rotary=self.rotary if window is None else self.local_rotary,
            window=window,
        )

    def decoder_weights(self, layers: list[DecoderLayer], norm: RMSNorm) -> DecoderWeights:
        rounded = torch.tensor(self.config.hidden_size**0.5, dtype=self.dtype)  # as by transformers
        return replace(
            super().decoder_weights(layers, add_one(norm)),
            attention_scale=self.config.query_pre_attn_scalar**-0.5,
            embedding_scale=rounded.item(),
            activation=Activation.GELU_TANH,
        )


def add_one(norm: RMSNorm) -> RMSNorm:
    """Return the norm whose weight is 1 more."""
    norm.weight.add_(1.0)
    return norm


Model: ModelFactory = Gemma3Model
