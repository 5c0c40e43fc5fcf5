"""OLMo 2: layers whose norms are behind attention and MLP, and norms of all queries and of all keys together."""

from __future__ import annotations

from trioengine.worker.kernels import DecoderLayer
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader, LlamaModel


class Olmo2Model(LlamaModel):
    """An OLMo 2."""

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        return DecoderLayer(
            qkv=reader.qkv(),
            output=reader.output(),
            mlp=reader.mlp(),
            attention_norm=None,
            mlp_norm=None,
            attention_output_norm=reader.norm("post_attention_layernorm"),
            mlp_output_norm=reader.norm("post_feedforward_layernorm"),
            query_norm=reader.norm("self_attn.q_norm"),
            key_norm=reader.norm("self_attn.k_norm"),
            rotary=self.rotary,
        )


Model: ModelFactory = Olmo2Model
