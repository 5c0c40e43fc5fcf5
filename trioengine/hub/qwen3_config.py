"""The shape of a dense Qwen3 model: a Llama that normalizes each head of queries and keys (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub import llama_config
from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig
from trioengine.hub.model_config import Fields, Shape
from trioengine.hub.qwen2_config import qwen_windows

MODEL_TYPES = ("qwen3",)
HEAD_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}  # in GGUF files


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """The shape of a Qwen3 model."""

    def layer_tensors(self) -> dict[str, Shape]:
        return LlamaConfig.layer_tensors(self) | head_norms(self.head_dim)


def head_norms(head_dim: int) -> dict[str, Shape]:
    """Return the shapes of the norms of each head of queries and keys."""
    return {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}


def config_from_hf(fields: Fields, num_tensors: int) -> Qwen3Config:
    """Read config.json. Raises ModelError, naming the field."""
    fields.count("num_key_value_heads")  # transformers' default is 32, and not the number of heads
    defaults = fields.defaulting({"head_dim": 128})
    return Qwen3Config.from_hf(defaults, num_tensors, windows=qwen_windows(fields, num_tensors), mlp_bias=False)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Qwen3Config:
    """Read the `qwen3.*` metadata. Raises ModelError, naming the key or the tensor."""
    return Qwen3Config.from_gguf(metadata, shapes, path, "qwen3")


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return llama_config.hf_name(name, LAYER_NAMES | HEAD_NORM_NAMES)
