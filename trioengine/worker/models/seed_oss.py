"""Seed-OSS: Llama's layers; the biases that its configuration names are read with their weights."""

from __future__ import annotations

from trioengine.worker.models.llama import Model as Model
