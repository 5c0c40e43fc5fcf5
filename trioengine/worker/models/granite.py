"""Granite 3: Llama's layers, with multipliers of embeddings, scores, results and logits."""

from __future__ import annotations

from dataclasses import replace

from trioengine.worker.kernels import DecoderLayer, DecoderWeights, RMSNorm
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LlamaModel


class GraniteModel(LlamaModel):
    """A dense Granite 3."""

    def decoder_weights(self, layers: list[DecoderLayer], norm: RMSNorm) -> DecoderWeights:
        return replace(
            super().decoder_weights(layers, norm),
            attention_scale=self.config.attention_multiplier,
            embedding_scale=self.config.embedding_multiplier,
            residual_scale=self.config.residual_multiplier,
            logits_scaling=self.config.logits_scaling,
        )


Model: ModelFactory = GraniteModel
