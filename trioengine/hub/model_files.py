"""A model's files, of either format, to what the engine must know of it."""

from __future__ import annotations

from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.hub import gguf_model, huggingface_model
from trioengine.hub.model_info import ModelFormat as ModelFormat
from trioengine.hub.model_info import ModelInfo as ModelInfo
from trioengine.hub.pull import name_of


def read_model(path: Path) -> ModelInfo:
    """Read a .gguf file, or a directory as Hugging Face has them; blocks, for less than a second.

    Truncated and lying weight files are refused, too. Raises ModelError, naming the file and the field, and of a pulled
    file the remedy.
    """
    if path.is_dir():
        return huggingface_model.read(path)
    try:
        return gguf_model.read(path)
    except ModelError as exc:
        if (name := name_of(path)) is None:
            raise
        raise ModelError(f"{exc}; remove it and run `trioengine pull {name}`") from exc
