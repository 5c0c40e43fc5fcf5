"""A model's files, of either format, to what the engine must know of it."""

from __future__ import annotations

from pathlib import Path

from trioengine.hub import gguf_model, huggingface_model
from trioengine.hub.model_info import ModelFormat as ModelFormat
from trioengine.hub.model_info import ModelInfo as ModelInfo


def read_model(path: Path) -> ModelInfo:
    """Read a .gguf file, or a directory as Hugging Face has them; blocks, for less than a second.

    Truncated and lying weight files are refused, too. Raises ModelError, naming the file and the field.
    """
    return huggingface_model.read(path) if path.is_dir() else gguf_model.read(path)
