"""Which architectures there are: `model_type` to what builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trioengine.core.errors import ModelError
from trioengine.worker.models import llama_config, llama_gguf
from trioengine.worker.models.llama_config import LlamaConfig


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One architecture: how its configuration and its tensors are read."""

    config_from_hf: Callable[[Mapping[str, Any]], LlamaConfig]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]], Path], LlamaConfig]
    hf_name: Callable[[str], str]  # of a GGUF tensor
    from_gguf_layout: Callable[[str, torch.Tensor, LlamaConfig], torch.Tensor]


MODELS: dict[str, ModelEntry] = {
    "llama": ModelEntry(
        llama_config.config_from_hf, llama_gguf.config_from_gguf, llama_gguf.hf_name, llama_gguf.from_gguf_layout
    )
}


def find_model(model_type: object, path: Path) -> ModelEntry:
    """The entry of `model_type`; ModelError names what is not supported, and what is."""
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ModelError(f"{path}: the architecture {model_type!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[model_type]
