"""Llama: grouped-query attention, rotary embeddings, SwiGLU, RMSNorm (arXiv 2302.13971, 2307.09288)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trioengine.hub.experts_config import ExpertsShape
from trioengine.hub.llama_config import FREQUENCY_DIVISORS, LlamaConfig
from trioengine.worker.kernels import (
    Attention,
    Computed,
    DecoderLayer,
    DecoderWeights,
    Experts,
    GatedMLP,
    Kernels,
    RMSNorm,
    RotaryTable,
    Routing,
)
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.kernels.rotary import attention_factor, inverse_frequencies
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.models import ModelFactory
from trioengine.worker.weights.checkpoint import WeightReader


class LayerReader:
    """Reads the layers and norms whose names begin with the prefix."""

    def __init__(self, weights: WeightReader, prefix: str, epsilon: float) -> None:
        self._weights, self._prefix, self._epsilon = weights, prefix, epsilon

    def below(self, prefix: str) -> LayerReader:
        """A reader of names with a longer prefix."""
        return LayerReader(self._weights, self._prefix + prefix, self._epsilon)

    def linear(self, *names: str) -> Linear:
        return self._weights.linear(*(self._prefix + name for name in names))

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), self._epsilon)

    def has(self, name: str) -> bool:
        return self._weights.has(self._prefix + name)

    def tensor(self, name: str) -> Tensor:
        """The tensor, in float32."""
        return self._weights.tensor(self._prefix + name, torch.float32)

    def qkv(self) -> Linear:
        return self.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def output(self) -> Linear:
        return self.linear("self_attn.o_proj")

    def mlp(self, name: str = "mlp") -> GatedMLP:
        return GatedMLP(self.linear(f"{name}.gate_proj", f"{name}.up_proj"), self.linear(f"{name}.down_proj"))

    def experts(self, shape: ExpertsShape) -> Experts:
        names = [f"mlp.experts.{index}" for index in range(shape.count)]
        routers, has_shared = ["mlp.gate"], shape.shared_size > 0
        if has_shared:
            names.append("mlp.shared_expert")
            routers.append("mlp.shared_expert_gate")
        router = self._weights.exact_linear(*(self._prefix + name for name in routers))
        return Experts(router, list(map(self.mlp, names)), Routing(shape.num_chosen, shape.normalizes, has_shared))


class LlamaModel:
    """The embedding, the decoder, and the head. Other architectures override how layers and the decoder are read."""

    last_norm = "norm"  # the name of the norm behind the layers

    def __init__(
        self,
        config: LlamaConfig,
        weights: WeightReader,
        kernels: Kernels,
        max_model_len: int,
        prefix: str = "model.",
    ) -> None:
        """Read the weights, one layer at a time; `prefix` stands before the names of all but the head's."""
        self.config: Any = config  # of the architecture's own class
        embedding = f"{prefix}embed_tokens"
        self._embedding = weights.tensor(f"{embedding}.weight")
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._head = self._read_head(weights, embedding)
        frequencies = self.read_frequencies(weights, max_model_len)
        self.rotary = self.rotary_table(frequencies, max_model_len, attention_factor(config.rope_scaling))
        reader = LayerReader(weights, prefix, config.rms_norm_eps)
        layers = [self.read_layer(index, reader.below(f"layers.{index}.")) for index in range(config.num_layers)]
        self._decoder = kernels.decoder(config, self.decoder_weights(layers, reader.norm(self.last_norm)))

    def _read_head(self, weights: WeightReader, embedding: str) -> Linear | None:
        """The layer from hidden states to logits; None for an embedding model."""
        if self.config.embeds:
            return None
        is_tied = self.config.tie_word_embeddings
        return weights.head(embedding, self._embedding) if is_tied else weights.head("lm_head")

    def read_frequencies(self, weights: WeightReader, max_positions: int) -> Tensor:
        """The frequencies of rotary positions: [rotary_dim / 2], float32."""
        config = self.config
        frequencies = inverse_frequencies(config.rope_theta, config.rotary_dim, config.rope_scaling, max_positions)
        if weights.has(FREQUENCY_DIVISORS):
            frequencies = frequencies / weights.tensor(FREQUENCY_DIVISORS, torch.float32).cpu()
        return frequencies

    def rotary_table(self, frequencies: Tensor, max_positions: int, scale: float = 1.0) -> RotaryTable:
        """A table of so many positions, on the model's device."""
        return RotaryTable(frequencies, max_positions, self.dtype, self.device, scale)

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        """Read the weights of the layer `index`, whose names the reader's prefix begins."""
        return DecoderLayer(
            qkv=reader.qkv(),
            output=reader.output(),
            mlp=self.read_mlp(index, reader),
            attention_norm=reader.norm("input_layernorm"),
            mlp_norm=reader.norm("post_attention_layernorm"),
            rotary=self.rotary,
            window=self.config.windows[index],
        )

    def read_mlp(self, index: int, reader: LayerReader) -> GatedMLP | Experts:
        """Read the MLP of the layer `index`, as `read_layer` does."""
        return reader.mlp()

    def decoder_weights(self, layers: list[DecoderLayer], norm: RMSNorm) -> DecoderWeights:
        """Add the embedding, the head, and the numbers that all layers share."""
        return DecoderWeights(self._embedding, layers, norm, self._head, attention_scale=self.config.head_dim**-0.5)

    def forward(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Tensor:
        """Compute the batch, and store its keys, values and states: hidden states [num_rows, hidden_size]."""
        return self._decoder.forward(batch, attention, states)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [num_rows, vocab_size], in float32, of rows that `forward` has returned."""
        return self._decoder.logits(hidden)

    def compute(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Computed:
        """Compute the batch as `forward` does, the logits of its output rows, and their best tokens."""
        return self._decoder.compute(batch, attention, states)


Model: ModelFactory = LlamaModel
