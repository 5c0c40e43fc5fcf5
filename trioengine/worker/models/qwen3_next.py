"""Qwen3-Next: Qwen3.5's layers with experts; its directories have other tensors (hub/qwen3_next_config.py)."""

from __future__ import annotations

from trioengine.worker.models import ModelFactory
from trioengine.worker.models.qwen3_5_moe_text import Qwen35MoeModel

Model: ModelFactory = Qwen35MoeModel
