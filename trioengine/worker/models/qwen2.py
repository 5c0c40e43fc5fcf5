"""Qwen2 and Qwen2.5: Llama's layers; the biases of queries, keys and values are read with their weights."""

from __future__ import annotations

from trioengine.worker.models.llama import Model as Model
