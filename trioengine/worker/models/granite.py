"""Granite 3: Llama's layers, with multipliers of embeddings, scores, results and logits."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from trioengine.worker.kernels import DecoderLayer, DecoderWeights, RMSNorm
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LlamaModel


class GraniteModel(LlamaModel):
    """A dense Granite 3."""

    def embed(self, token_ids: Tensor) -> Tensor:
        embeddings = super().embed(token_ids)
        return embeddings.mul_(self.config.embedding_multiplier)

    def decoder_weights(self, layers: list[DecoderLayer], norm: RMSNorm) -> DecoderWeights:
        return replace(
            super().decoder_weights(layers, norm),
            attention_scale=self.config.attention_multiplier,
            residual_scale=self.config.residual_multiplier,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).div_(self.config.logits_scaling)


Model: ModelFactory = GraniteModel
