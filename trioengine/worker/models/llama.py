"""Llama: grouped-query attention, rotary embeddings, SwiGLU, RMSNorm (arXiv 2302.13971, 2307.09288)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trioengine.hub.llama_config import FREQUENCY_DIVISORS, LlamaConfig, RopeScaling, RopeType
from trioengine.worker.kernels import Attention, Kernels, RMSNorm, RotaryTable
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.models import ModelFactory
from trioengine.worker.weights.checkpoint import WeightReader


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """The weights of one decoder layer; projections that share their input are one."""

    input_norm: RMSNorm
    qkv: Linear
    output: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear


class LlamaModel:
    """The forward pass. The residual stream is kept in float32, whatever the dtype of the weights."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: WeightReader,
        kernels: Kernels,
        max_model_len: int,
        prefix: str = "model.",
    ) -> None:
        """Read the weights, one layer at a time; `prefix` stands before the names of all but the head's."""
        self.config = config
        self._kernels = kernels
        embedding = f"{prefix}embed_tokens"
        self._embedding = weights.tensor(f"{embedding}.weight")
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        is_tied = config.tie_word_embeddings
        self._head = weights.linear_of(self._embedding, embedding) if is_tied else weights.linear("lm_head")
        self._norm = RMSNorm(weights.tensor(f"{prefix}norm.weight").float(), config.rms_norm_eps)
        frequencies = inverse_frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
        if weights.has(FREQUENCY_DIVISORS):
            frequencies = frequencies / weights.tensor(FREQUENCY_DIVISORS).float().cpu()
        self._rotary = RotaryTable(frequencies, max_model_len, self.dtype, self.device)
        self._layers = [_read_layer(config, f"{prefix}layers.{index}.", weights) for index in range(config.num_layers)]

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        """Compute the batch and store its keys and values: hidden states [num_rows, hidden_size] for `logits`."""
        kernels = self._kernels
        delta = F.embedding(batch.token_ids, self._embedding)  # [num_tokens, hidden_size]
        if batch.embeddings is not None:
            delta.index_copy_(0, batch.embeddings.rows, batch.embeddings.values)
        hidden = torch.zeros_like(delta, dtype=torch.float32)
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, kernels.add_norm(hidden, delta, layer.input_norm), batch, attention)
            if layer is self._layers[-1]:  # the last layer's other rows are needed for their keys and values only
                hidden, attended = (rows.index_select(0, batch.output_rows) for rows in (hidden, attended))
            delta = layer.output(attended)
            gate_up = layer.gate_up(kernels.add_norm(hidden, delta, layer.post_attention_norm))
            delta = layer.down(kernels.silu_and_multiply(gate_up))
        return kernels.add_norm(hidden, delta, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [num_rows, vocab_size] of rows that `forward` has returned."""
        return self._head(hidden)

    def _attend(
        self, index: int, layer: LlamaLayer, hidden: Tensor, batch: ForwardBatch, attention: Attention
    ) -> Tensor:
        config = self.config
        rotated = config.num_heads + config.num_kv_heads
        heads = layer.qkv(hidden).view(-1, rotated + config.num_kv_heads, config.head_dim)
        self._kernels.rotate_(heads, rotated, self._rotary, batch.positions)
        return attention.forward(index, heads)


def _read_layer(config: LlamaConfig, prefix: str, weights: WeightReader) -> LlamaLayer:
    def linear(*names: str) -> Linear:
        return weights.linear(*(prefix + name for name in names))

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.tensor(f"{prefix}{name}.weight").float(), config.rms_norm_eps)

    return LlamaLayer(
        input_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=linear("self_attn.o_proj"),
        post_attention_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> Tensor:
    """[head_dim / 2] in float32; by the formulas of transformers' modeling_rope_utils."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling.kind is RopeType.LINEAR:
        return frequencies / scaling.factor
    if scaling.kind is RopeType.LLAMA3:
        return _llama3_frequencies(frequencies, scaling)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    old = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (old / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > old / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= old / low) & (wavelengths >= old / high)
    return torch.where(between, blended, scaled)


Model: ModelFactory = LlamaModel
