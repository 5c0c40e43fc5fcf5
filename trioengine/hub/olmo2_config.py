"""The shape of an OLMo 2 model: norms behind attention and MLP, and of all queries together (arXiv 2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub import llama_config
from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig
from trioengine.hub.model_config import Fields, Shape

MODEL_TYPES = ("olmo2",)
_LAYER_NAMES = {
    **LAYER_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    """The shape of an OLMo 2 model."""

    def layer_tensors(self) -> dict[str, Shape]:
        tensors = LlamaConfig.layer_tensors(self)
        tensors["post_feedforward_layernorm.weight"] = tensors.pop("input_layernorm.weight")
        return tensors | all_head_norms(self)


def all_head_norms(config: LlamaConfig) -> dict[str, Shape]:
    """Return the shapes of the norms of all queries together, and of all keys."""
    return {
        "self_attn.q_norm.weight": (config.num_heads * config.head_dim,),
        "self_attn.k_norm.weight": (config.num_kv_heads * config.head_dim,),
    }


def config_from_hf(fields: Fields, num_tensors: int) -> Olmo2Config:
    """Read config.json. Raises ModelError, naming the field."""
    return Olmo2Config.from_hf(fields.defaulting({"rms_norm_eps": 1e-5}), num_tensors, mlp_bias=False)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Olmo2Config:
    """Read the `olmo2.*` metadata. Raises ModelError, naming the key or the tensor."""
    return Olmo2Config.from_gguf(metadata, shapes, path, "olmo2")


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return llama_config.hf_name(name, _LAYER_NAMES)
