"""Mistral: Llama's layers; its configuration gives the windows."""

from __future__ import annotations

from trioengine.worker.models.llama import Model as Model
