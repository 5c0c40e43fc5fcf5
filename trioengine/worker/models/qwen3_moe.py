"""Qwen3-MoE: Qwen3's layers, with experts in some of them."""

from __future__ import annotations

from trioengine.worker.kernels import Experts, GatedMLP
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.llama import LayerReader
from trioengine.worker.models.qwen3 import Qwen3Model


class Qwen3MoeModel(Qwen3Model):
    """A Qwen3 with experts."""

    def read_mlp(self, index: int, reader: LayerReader) -> GatedMLP | Experts:
        shape = self.config.experts
        return reader.experts(shape) if shape.layers[index] else reader.mlp()


Model: ModelFactory = Qwen3MoeModel
