"""Qwen3: Llama's layers, with norms of each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from trioengine.worker.kernels import DecoderLayer
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader, LlamaModel


class Qwen3Model(LlamaModel):
    """A dense Qwen3."""

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        query_norm, key_norm = reader.norm("self_attn.q_norm"), reader.norm("self_attn.k_norm")
        return replace(super().read_layer(index, reader), query_norm=query_norm, key_norm=key_norm)


Model: ModelFactory = Qwen3Model
