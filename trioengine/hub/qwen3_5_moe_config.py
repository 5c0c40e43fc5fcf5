"""The shape of a Qwen3.5 with experts: routed ones and a shared one in all layers, else as the dense ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub import experts_config, qwen3_5_config
from trioengine.hub.experts_config import GGUF_SHARED_NAMES, ExpertsShape, experts_from_gguf, experts_from_hf
from trioengine.hub.llama_config import count_layers, gguf_fields
from trioengine.hub.model_config import Fields, JoinedTensor, Shape
from trioengine.hub.qwen3_5_config import (
    DEFAULTS,
    Qwen35Config,
    decoder_fields,
    hybrid_gguf_values,
    hybrid_hf_name,
    hybrid_values,
)
from trioengine.hub.qwen3_5_config import stored_columns as stored_columns
from trioengine.hub.qwen3_5_config import stored_form as stored_form
from trioengine.hub.qwen3_5_config import stored_rows as stored_rows

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
GGUF_TYPES = ("qwen35moe",)
GGUF_NAMES = {**qwen3_5_config.GGUF_NAMES, **experts_config.GGUF_NAMES, **GGUF_SHARED_NAMES}
MOE_DEFAULTS = {  # transformers'
    **DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DEFAULTS = {**MOE_DEFAULTS, "num_local_experts": 256, "num_experts_per_tok": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """The shape of a Qwen3.5 with experts."""

    experts: ExpertsShape

    @property
    def has_experts(self) -> bool:
        return any(self.experts.layers)

    def wanted_tensors(self, prefix: str = "model.") -> dict[str, Shape]:
        wanted = Qwen35Config.wanted_tensors(self, prefix)
        self.experts.replace_mlps(wanted, self.prefix, self.hidden_size)
        return wanted

    def joined_tensors(self) -> Iterator[JoinedTensor]:
        for index in range(self.num_layers):
            layer = f"{self.prefix}layers.{index}."
            for name, shape, parts in self.joined_of_layer():
                yield JoinedTensor(f"{layer}{name}", shape, {f"{layer}{part}": rows for part, rows in parts.items()})

    def joined_of_layer(self) -> Iterator[JoinedTensor]:
        """Yield a layer's joined tensors, by their names behind the layer's."""
        return self.experts.stacks(self.hidden_size)


def config_from_hf(fields: Fields, num_tensors: int) -> Qwen35MoeConfig:
    """Read config.json, or its `text_config`, if it has a vision tower. Raises ModelError, naming the field."""
    text = decoder_fields(fields).defaulting(_DEFAULTS)
    size = text.count("moe_intermediate_size")
    layers = (True,) * count_layers(text, "num_hidden_layers", num_tensors)
    return Qwen35MoeConfig.from_hf(
        text.defaulting({"intermediate_size": size}),
        num_tensors,
        model_type=fields.string("model_type"),
        intermediate_size=size,  # of an MLP, which no layer has
        experts=experts_from_hf(
            text, size, layers, normalizes=True, shared_size=text.count("shared_expert_intermediate_size")
        ),
        **hybrid_values(text, num_tensors),
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Qwen35MoeConfig:
    """Read the `qwen35moe.*` metadata. Raises ModelError, naming the key or the tensor."""
    values = hybrid_moe_gguf_values(gguf_fields(metadata, path, "qwen35moe"), shapes)
    size = values["experts"].size
    values |= {"model_type": "qwen3_5_moe_text", "intermediate_size": size}
    return Qwen35MoeConfig.from_gguf(
        {"qwen35moe.feed_forward_length": size, **metadata}, shapes, path, "qwen35moe", **values
    )


def hybrid_moe_gguf_values(fields: Fields, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the values of a decoder with delta nets and experts in all layers, as `hybrid_gguf_values` does."""
    values, size = hybrid_gguf_values(fields, shapes), fields.count("expert_feed_forward_length")
    shared = fields.count("expert_shared_feed_forward_length")
    experts = experts_from_gguf(fields, size, values["num_layers"], normalizes=True, shared_size=shared)
    return {**values, "experts": experts}


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return hybrid_hf_name(name, GGUF_NAMES)
