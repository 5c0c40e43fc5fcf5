"""SmolLM3: Llama's layers, some of which do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace

from trioengine.worker.kernels import DecoderLayer
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader, LlamaModel


class SmolLM3Model(LlamaModel):
    """A SmolLM3."""

    def read_layer(self, index: int, reader: LayerReader) -> DecoderLayer:
        layer = super().read_layer(index, reader)
        return layer if self.config.rotates[index] else replace(layer, rotary=None)


Model: ModelFactory = SmolLM3Model
