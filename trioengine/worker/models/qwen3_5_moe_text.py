"""Qwen3.5 with experts, texts: routed experts and a shared one with a gate, in all layers or in some."""

from __future__ import annotations

from trioengine.worker.kernels import Experts, GatedMLP
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader
from trioengine.worker.models.qwen3_5_text import Qwen35Model


class Qwen35MoeModel(Qwen35Model):
    """A Qwen3.5 with experts in all layers, or in some."""

    def read_mlp(self, index: int, reader: LayerReader) -> GatedMLP | Experts:
        shape = self.config.experts
        return reader.experts(shape) if shape.layers[index] else reader.mlp()


Model: ModelFactory = Qwen35MoeModel
