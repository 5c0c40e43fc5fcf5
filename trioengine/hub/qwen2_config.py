"""The shape of a Qwen2 or Qwen2.5 model: a Llama with biases of queries, keys and values (arXiv 2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.hub import llama_config
from trioengine.hub.llama_config import LlamaConfig
from trioengine.hub.llama_config import hf_name as hf_name
from trioengine.hub.model_config import Fields, Shape

MODEL_TYPES = ("qwen2",)


def config_from_hf(fields: Fields, num_tensors: int) -> LlamaConfig:
    """Read config.json. Raises ModelError, naming the field, also for a sliding window."""
    fields.count("num_key_value_heads")  # transformers' default is 32, and not the number of heads
    given = fields.get("layer_types")
    layer_types = given if isinstance(given, list) else [given]
    if fields.flag("use_sliding_window") or any(kind not in (None, "full_attention") for kind in layer_types):
        raise ModelError(f"{fields.path}: a sliding window (use_sliding_window, layer_types) is not supported")
    return _qwen2(llama_config.config_from_hf(fields, num_tensors))


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> LlamaConfig:
    """Read the `qwen2.*` metadata as a Llama's. Raises ModelError, naming the key or the tensor."""
    return _qwen2(llama_config.config_from_gguf(metadata, shapes, path, "qwen2"))


def interleaved_heads(name: str, config: LlamaConfig) -> int | None:
    """None: llama.cpp stores the rows of every tensor in their order."""
    return None


def _qwen2(config: LlamaConfig) -> LlamaConfig:
    return replace(config, model_type="qwen2", attention_bias=True, output_bias=False, mlp_bias=False)
