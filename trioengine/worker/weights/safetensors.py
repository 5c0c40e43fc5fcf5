"""A directory with config.json and model.safetensors, or shards with their index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trioengine.core.bounds import excerpt
from trioengine.core.errors import ModelError
from trioengine.hub.checkpoint import read_safetensors
from trioengine.worker.kernels.four_bit import FourBitWeight
from trioengine.worker.weights.checkpoint import TensorShape


class SafetensorsCheckpoint:
    """Tensors of a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self.path = path
        header = read_safetensors(path)
        self.config, self._stored = header.config, header.tensors
        self.tensors = {name: TensorShape(info.shape, info.nbytes) for name, info in header.tensors.items()}
        self._files: dict[Path, Any] = {}  # those that are open

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        file = self._stored[name].file
        try:
            if file not in self._files:
                self._files[file] = safe_open(str(file), framework="pt", device="cpu")
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as exc:  # it has changed since its header was read
            raise ModelError(f"{file} is damaged: {excerpt(str(exc))}") from exc
        return tensor.to(dtype, copy=True)

    def read_four_bit(self, name: str) -> FourBitWeight | None:
        return None

    def close(self) -> None:
        self._files.clear()
