"""The shape of a Qwen3 model with experts (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub import llama_config
from trioengine.hub.experts_config import (
    GGUF_NAMES,
    ExpertsConfig,
    experts_from_gguf,
    experts_from_hf,
    layers_with_experts,
)
from trioengine.hub.llama_config import LlamaConfig, count_layers, gguf_fields
from trioengine.hub.model_config import Fields, Shape
from trioengine.hub.qwen3_config import HEAD_NORM_NAMES, head_norms

MODEL_TYPES = ("qwen3_moe",)
GGUF_TYPES = ("qwen3moe",)
_DEFAULTS = {  # transformers'
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "num_local_experts": 128,
    "moe_intermediate_size": 768,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(ExpertsConfig):
    """The shape of a Qwen3-MoE model."""

    def layer_tensors(self) -> dict[str, Shape]:
        return LlamaConfig.layer_tensors(self) | head_norms(self.head_dim)


def config_from_hf(fields: Fields, num_tensors: int) -> Qwen3MoeConfig:
    """Read config.json. Raises ModelError, naming the field."""
    num_layers = count_layers(fields, "num_hidden_layers", num_tensors)
    windows = (_window(fields),) * num_layers
    fields = fields.defaulting(_DEFAULTS)
    size, normalizes = fields.count("moe_intermediate_size"), fields.flag("norm_topk_prob")
    experts = experts_from_hf(fields, size, layers_with_experts(fields, num_layers), normalizes=normalizes)
    return Qwen3MoeConfig.from_hf(fields, num_tensors, windows=windows, mlp_bias=False, experts=experts)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Qwen3MoeConfig:
    """Read the `qwen3moe.*` metadata. Raises ModelError, naming the key or the tensor."""
    fields = gguf_fields(metadata, path, "qwen3moe")
    num_layers = count_layers(fields, "block_count", len(shapes))
    size = fields.count("expert_feed_forward_length")
    experts = experts_from_gguf(fields, size, num_layers, normalizes=True)
    return Qwen3MoeConfig.from_gguf(metadata, shapes, path, "qwen3moe", model_type="qwen3_moe", experts=experts)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return llama_config.hf_name(name, GGUF_NAMES | HEAD_NORM_NAMES)


def _window(fields: Fields) -> int | None:
    """Return the window of all layers; transformers ignores `sliding_window` unless `use_sliding_window` is true."""
    is_null = fields.has("sliding_window") and fields.get("sliding_window") is None
    return fields.count("sliding_window", 4096) if fields.flag("use_sliding_window") and not is_null else None
