"""Qwen3.5 with a vision tower, of which only the decoder is read."""

from __future__ import annotations

from trioengine.hub.qwen3_5_config import TEXT_PREFIX, Qwen35Config
from trioengine.worker.kernels import Kernels
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.qwen3_5_text import Qwen35Model
from trioengine.worker.weights.checkpoint import WeightReader


def _decoder(config: Qwen35Config, weights: WeightReader, kernels: Kernels, max_model_len: int) -> Qwen35Model:
    return Qwen35Model(config, weights, kernels, max_model_len, TEXT_PREFIX)


Model: ModelFactory = _decoder
