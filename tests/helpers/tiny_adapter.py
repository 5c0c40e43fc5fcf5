"""Adapters with random numbers, as PEFT stores them, and checkpoints into which they are merged."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from helpers.random_checkpoint import RandomTensors
from trioengine.hub.adapter import CONFIG, WEIGHTS, adaptable_matrices
from trioengine.worker.weights import open_checkpoint

PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}


def matrices_of(model: Path) -> dict[str, tuple[int, ...]]:
    """The matrices of a checkpoint that adapters can change."""
    return adaptable_matrices(open_checkpoint(str(model)).config)


def write_adapter(
    path: Path, model: Path, *, seed: int = 0, rank: int = 4, targets: str = "", **config: object
) -> Path:
    """An adapter of the model's matrices whose names have `targets` in them, in a directory."""
    tensors = RandomTensors(seed)
    for name, (rows, columns) in matrices_of(model).items():
        if targets in name:
            tensors.add(f"base_model.model.{name}.lora_A.weight", rank, columns, scale=0.15)
            tensors.add(f"base_model.model.{name}.lora_B.weight", rows, rank, scale=0.15)
    return save_adapter(path, PEFT | {"r": rank} | config, tensors.by_name)


def save_adapter(path: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """A directory of this configuration and these tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(json.dumps(config))
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    return path


def merge(path: Path, model: Path, adapter: Path) -> Path:
    """A copy of a checkpoint, to whose matrices the adapter's changes are added."""
    path.mkdir(parents=True)
    config, changes = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    weights = load_file(model / "model.safetensors")
    for name, down in changes.items():
        if name.endswith("lora_A.weight"):
            up = changes[name.replace("lora_A", "lora_B")]
            divisor = math.sqrt(len(down)) if config.get("use_rslora") else len(down)
            matrix = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[matrix] = weights[matrix] + config["lora_alpha"] / divisor * (up @ down)
    for file in model.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_bytes(file.read_bytes())
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
