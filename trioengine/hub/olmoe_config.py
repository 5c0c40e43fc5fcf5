"""The shape of an OLMoE model: experts in all layers, and norms of all queries together (arXiv 2409.02060)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.hub import llama_config
from trioengine.hub.experts_config import GGUF_NAMES, ExpertsConfig, experts_from_gguf, experts_from_hf
from trioengine.hub.llama_config import LlamaConfig, count_layers, gguf_fields
from trioengine.hub.model_config import Fields, Shape
from trioengine.hub.olmo2_config import all_head_norms
from trioengine.hub.qwen3_config import HEAD_NORM_NAMES

MODEL_TYPES = ("olmoe",)
_DEFAULTS = {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_local_experts": 64}  # transformers'


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoeConfig(ExpertsConfig):
    """The shape of an OLMoE model."""

    def layer_tensors(self) -> dict[str, Shape]:
        return LlamaConfig.layer_tensors(self) | all_head_norms(self)


def config_from_hf(fields: Fields, num_tensors: int) -> OlmoeConfig:
    """Read config.json. Raises ModelError, naming the field."""
    if fields.get("clip_qkv") is not None:
        raise ModelError(f"{fields.path}: clip_qkv is not supported")
    fields = fields.defaulting(_DEFAULTS)
    num_layers = count_layers(fields, "num_hidden_layers", num_tensors)
    size, normalizes = fields.count("intermediate_size"), fields.flag("norm_topk_prob")
    experts = experts_from_hf(fields, size, (True,) * num_layers, normalizes=normalizes)
    return OlmoeConfig.from_hf(fields, num_tensors, mlp_bias=False, experts=experts)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> OlmoeConfig:
    """Read the `olmoe.*` metadata. Raises ModelError, naming the key or the tensor."""
    fields = gguf_fields(metadata, path, "olmoe")
    if fields.get("attention.clamp_kqv"):
        raise ModelError(f"{path}: olmoe.attention.clamp_kqv is not supported")
    num_layers, size = count_layers(fields, "block_count", len(shapes)), fields.count("feed_forward_length")
    experts = experts_from_gguf(fields, size, num_layers, normalizes=False)
    return OlmoeConfig.from_gguf(metadata, shapes, path, "olmoe", experts=experts)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return llama_config.hf_name(name, GGUF_NAMES | HEAD_NORM_NAMES)
