"""Phi-3 and Phi-4-mini: Llama's layers, whose projections are stored joined."""

from __future__ import annotations

import torch
from torch import Tensor

from trioengine.hub.phi3_config import LONG_DIVISORS, SHORT_DIVISORS
from trioengine.worker.kernels import DecoderLayer, GatedMLP
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader, LlamaModel
from trioengine.worker.weights.checkpoint import WeightReader


class Phi3Model(LlamaModel):
    """A Phi-3 or Phi-4-mini."""

    def read_frequencies(self, weights: WeightReader, max_positions: int) -> Tensor:
        frequencies = super().read_frequencies(weights, max_positions)
        is_long = max_positions > self.config.rope_scaling.original_max_position_embeddings
        divisors = LONG_DIVISORS if is_long else SHORT_DIVISORS  # of a GGUF file
        return frequencies / weights.tensor(divisors, torch.float32).cpu() if weights.has(divisors) else frequencies

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        return DecoderLayer(
            qkv=reader.linear("self_attn.qkv_proj"),
            output=reader.output(),
            mlp=GatedMLP(reader.linear("mlp.gate_up_proj"), reader.linear("mlp.down_proj")),
            attention_norm=reader.norm("input_layernorm"),
            mlp_norm=reader.norm("post_attention_layernorm"),
            rotary=self.rotary,
            window=self.config.windows[index],
        )


Model: ModelFactory = Phi3Model
