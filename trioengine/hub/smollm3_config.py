"""The shape of a SmolLM3 model: a Llama some of whose layers do not rotate queries and keys (arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub.llama_config import LlamaConfig, count_layers, gguf_fields, windows_of
from trioengine.hub.llama_config import hf_name as hf_name
from trioengine.hub.llama_config import stored_rows as stored_rows
from trioengine.hub.model_config import Fields, Shape

MODEL_TYPES = ("smollm3",)
_INTERVAL = 4  # of the layers without rotation; llama.cpp's is fixed
_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """The shape of a SmolLM3 model."""

    rotates: tuple[bool, ...]  # of each layer


def config_from_hf(fields: Fields, num_tensors: int) -> SmolLM3Config:
    """Read config.json. Raises ModelError, naming the field."""
    num_layers = count_layers(fields, "num_hidden_layers", num_tensors)
    rotates = _rotates(fields, num_layers)
    has_windows = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    windows = windows_of(fields, num_layers, lambda index: has_windows and not rotates[index])
    defaults = fields.defaulting(_DEFAULTS)
    return SmolLM3Config.from_hf(defaults, num_tensors, windows=windows, rotates=rotates)


def _rotates(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    given = fields.get("no_rope_layers")  # 1: a layer that rotates
    if given is None:
        return _every(num_layers, fields.count("no_rope_layer_interval", _INTERVAL))
    if not isinstance(given, list) or len(given) < num_layers or any(entry not in (0, 1) for entry in given):
        raise fields.bad("no_rope_layers", f"must be at least {num_layers} of 0 and 1")
    return tuple(map(bool, given[:num_layers]))


def _every(num_layers: int, interval: int) -> tuple[bool, ...]:
    return tuple((index + 1) % interval != 0 for index in range(num_layers))


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> SmolLM3Config:
    """Read the `smollm3.*` metadata. Raises ModelError, naming the key or the tensor."""
    rotates = _every(count_layers(gguf_fields(metadata, path, "smollm3"), "block_count", len(shapes)), _INTERVAL)
    return SmolLM3Config.from_gguf(metadata, shapes, path, "smollm3", rotates=rotates)
