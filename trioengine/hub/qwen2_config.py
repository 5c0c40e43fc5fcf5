"""The shape of a Qwen2 or Qwen2.5 model: a Llama with biases of queries, keys and values (arXiv 2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioengine.hub.llama_config import LlamaConfig, count_layers, windows_of
from trioengine.hub.llama_config import hf_name as hf_name
from trioengine.hub.model_config import Fields, Shape

MODEL_TYPES = ("qwen2",)
_BIASES = {"attention_bias": True, "output_bias": False, "mlp_bias": False}


def config_from_hf(fields: Fields, num_tensors: int) -> LlamaConfig:
    """Read config.json. Raises ModelError, naming the field."""
    fields.count("num_key_value_heads")  # transformers' default is 32, and not the number of heads
    return LlamaConfig.from_hf(fields, num_tensors, windows=qwen_windows(fields, num_tensors), **_BIASES)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> LlamaConfig:
    """Read the `qwen2.*` metadata. Raises ModelError, naming the key or the tensor."""
    return LlamaConfig.from_gguf(metadata, shapes, path, "qwen2", **_BIASES)


def qwen_windows(fields: Fields, num_tensors: int) -> tuple[int | None, ...]:
    """Return the window of each layer; transformers ignores `sliding_window` unless `use_sliding_window` is true."""
    num_layers = count_layers(fields, "num_hidden_layers", num_tensors)
    is_null = fields.has("sliding_window") and fields.get("sliding_window") is None
    if not fields.flag("use_sliding_window") or is_null:
        return windows_of(fields, num_layers, lambda _: False)
    fields = fields.defaulting({"sliding_window": 4096})
    first = fields.index("max_window_layers", 28)
    return windows_of(fields, num_layers, lambda index: index >= first)
