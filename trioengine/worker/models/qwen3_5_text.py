"""Qwen3.5 of texts: gated delta nets, and in every fourth layer attention with gates (arXiv 2412.06464)."""

from __future__ import annotations

from trioengine.worker.kernels import DecoderLayer, DecoderWeights, GatedDelta, RMSNorm
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.gemma3_text import add_one
from trioengine.worker.models.llama import LayerReader, LlamaModel


class Qwen35Model(LlamaModel):
    """A dense Qwen3.5. The weight of each norm is 1 more than the tensor, but for the norms in delta nets."""

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        attends = self.config.attends[index]
        mixer = reader.below("self_attn." if attends else "linear_attn.")
        return DecoderLayer(
            qkv=reader.qkv() if attends else mixer.linear("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            output=reader.output() if attends else mixer.linear("out_proj"),
            mlp=self.read_mlp(index, reader),
            attention_norm=add_one(reader.norm("input_layernorm")),
            mlp_norm=add_one(reader.norm("post_attention_layernorm")),
            query_norm=add_one(mixer.norm("q_norm")) if attends else None,
            key_norm=add_one(mixer.norm("k_norm")) if attends else None,
            rotary=self.rotary if attends else None,
            has_gates=attends,
            delta=None if attends else self._delta(mixer),
        )

    def _delta(self, reader: LayerReader) -> GatedDelta:
        shape = self.config.delta
        return GatedDelta(
            taps=reader.tensor("conv1d.weight").squeeze(1).t().contiguous(),
            rates=reader.tensor("A_log").exp_(),
            time_bias=reader.tensor("dt_bias"),
            norm=reader.norm("norm"),
            num_key_heads=shape.num_key_heads,
            key_dim=shape.key_dim,
        )

    def decoder_weights(self, layers: list[DecoderLayer], norm: RMSNorm) -> DecoderWeights:
        return super().decoder_weights(layers, add_one(norm))


Model: ModelFactory = Qwen35Model
