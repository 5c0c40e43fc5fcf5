"""The shape of a dense Granite 3 model: a Llama with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub.llama_config import LlamaConfig, gguf_fields
from trioengine.hub.llama_config import hf_name as hf_name
from trioengine.hub.llama_config import stored_rows as stored_rows
from trioengine.hub.model_config import Fields, Shape

MODEL_TYPES = ("granite",)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """The shape of a Granite model."""

    embedding_multiplier: float
    attention_multiplier: float  # of the products of queries and keys
    residual_multiplier: float  # of the results of attention and MLPs
    logits_scaling: float  # divides the logits


def config_from_hf(fields: Fields, num_tensors: int) -> GraniteConfig:
    """Read config.json. Raises ModelError, naming the field."""
    return GraniteConfig.from_hf(
        fields,
        num_tensors,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        attention_multiplier=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_scaling=fields.number("logits_scaling", 1.0),
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> GraniteConfig:
    """Read the `granite.*` metadata. Raises ModelError, naming the key or the tensor."""
    fields = gguf_fields(metadata, path, "granite")
    heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", fields.count("embedding_length") // heads)
    return GraniteConfig.from_gguf(
        metadata,
        shapes,
        path,
        "granite",
        embedding_multiplier=fields.number("embedding_scale", 1.0),
        attention_multiplier=fields.number("attention.scale", head_dim**-0.5),
        residual_multiplier=fields.number("residual_scale", 1.0),
        logits_scaling=fields.number("logit_scale", 1.0),
    )
