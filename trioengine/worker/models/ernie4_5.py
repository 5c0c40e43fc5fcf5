"""ERNIE 4.5, dense: Llama's layers; the configuration separates the rotary pairs of the files."""

from __future__ import annotations

from trioengine.worker.models.llama import Model as Model
