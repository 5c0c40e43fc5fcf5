"""The shape of a Seed-OSS model: a Llama with biases of queries, keys and values, and maybe of attention's output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioengine.hub import llama_config
from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig
from trioengine.hub.model_config import Fields, Shape

MODEL_TYPES = ("seed_oss",)
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128}  # of absent fields; null means as in a Llama
_LAYER_NAMES = {**LAYER_NAMES, "post_attention_norm": "post_attention_layernorm"}


def config_from_hf(fields: Fields, num_tensors: int) -> LlamaConfig:
    """Read config.json. Raises ModelError, naming the field."""
    absent = {name: default for name, default in _DEFAULTS.items() if not fields.has(name)}
    return LlamaConfig.from_hf(
        fields.defaulting(absent),
        num_tensors,
        attention_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias"),
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> LlamaConfig:
    """Read the `seed_oss.*` metadata. Raises ModelError, naming the key or the tensor."""
    return LlamaConfig.from_gguf(metadata, shapes, path, "seed_oss")


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return llama_config.hf_name(name, _LAYER_NAMES)
