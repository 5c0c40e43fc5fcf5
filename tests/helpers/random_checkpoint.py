"""Checkpoints with random weights: the same numbers for a seed, wherever they are written."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


class RandomTensors:
    """Tensors in float32, by their names. Their numbers depend on the order in which they are added."""

    def __init__(self, seed: int) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._random = np.random.default_rng(seed)

    def add(self, name: str, *shape: int, mean: float = 0.0, scale: float = 0.15) -> None:
        values = mean + scale * self._random.standard_normal(shape)
        self.by_name[name] = torch.from_numpy(values.astype(np.float32))


def write_checkpoint(path: Path, files: dict[str, dict], tensors: dict[str, torch.Tensor]) -> Path:
    """A Hugging Face directory of these JSON files and tensors."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
