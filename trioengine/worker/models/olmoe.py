"""OLMoE: Qwen3-MoE's layers, whose norms are of all queries and of all keys together: as large as their weights."""

from __future__ import annotations

from trioengine.worker.models import ModelFactory
from trioengine.worker.models.qwen3_moe import Qwen3MoeModel

Model: ModelFactory = Qwen3MoeModel
