"""Qwen3.5 with experts and a vision tower, of which only the decoder is read."""

from __future__ import annotations

from trioengine.hub.qwen3_5_config import TEXT_PREFIX
from trioengine.hub.qwen3_5_moe_config import Qwen35MoeConfig
from trioengine.worker.kernels import Kernels
from trioengine.worker.models import ModelFactory
from trioengine.worker.models.qwen3_5_moe_text import Qwen35MoeModel
from trioengine.worker.weights.checkpoint import WeightReader


def _decoder(config: Qwen35MoeConfig, weights: WeightReader, kernels: Kernels, max_model_len: int) -> Qwen35MoeModel:
    return Qwen35MoeModel(config, weights, kernels, max_model_len, TEXT_PREFIX)


Model: ModelFactory = _decoder
