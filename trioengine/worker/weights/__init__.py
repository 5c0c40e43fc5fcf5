"""Model files: safetensors directories and GGUF files behind one interface."""

from __future__ import annotations

from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.worker.weights.checkpoint import Checkpoint
from trioengine.worker.weights.files import GGUFCheckpoint, SafetensorsCheckpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: str) -> Checkpoint:
    """Open a .gguf file, or a directory with config.json and safetensors; only headers are read.

    Raises ModelError, naming the file, for anything that is missing, damaged or of an unsupported architecture.
    """
    location = Path(path)
    if location.is_dir():
        return SafetensorsCheckpoint(location)
    if not location.exists():
        raise ModelError(f"no model at {location}")
    if location.suffix.lower() != ".gguf":
        raise ModelError(f"{location} is neither a .gguf file nor a directory with config.json and safetensors")
    return GGUFCheckpoint(location)
