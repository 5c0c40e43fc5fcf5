"""LFM2: gated short convolutions, and attention with normalized heads in some of the layers (arXiv 2511.23404)."""

from __future__ import annotations

from trioengine.worker.kernels import Convolution, DecoderLayer, GatedMLP
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader, LlamaModel


class Lfm2Model(LlamaModel):
    """A decoder whose layers have a convolution or attention."""

    last_norm = "embedding_norm"

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        convolves = not self.config.attends[index]
        mixer = reader.below("conv." if convolves else "self_attn.")
        return DecoderLayer(
            qkv=mixer.linear("in_proj") if convolves else reader.qkv(),
            output=mixer.linear("out_proj"),
            mlp=GatedMLP(reader.linear("feed_forward.w1", "feed_forward.w3"), reader.linear("feed_forward.w2")),
            attention_norm=reader.norm("operator_norm"),
            mlp_norm=reader.norm("ffn_norm"),
            query_norm=None if convolves else mixer.norm("q_layernorm"),
            key_norm=None if convolves else mixer.norm("k_layernorm"),
            rotary=None if convolves else self.rotary,
            convolution=_convolution(mixer) if convolves else None,
        )


def _convolution(reader: LayerReader) -> Convolution:
    weight = reader.tensor("conv.weight").squeeze(1)  # [size, num_taps]
    return Convolution(weight.t().contiguous(), reader.tensor("conv.bias") if reader.has("conv.bias") else None)


Model: ModelFactory = Lfm2Model
