"""What a Llama model looks like, read from Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.worker.layers.rotary import RopeScaling, RopeType


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama model; ModelError names a field that cannot be used."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(f"the model's {name} must be a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ModelError(f"the model's {name} must be a positive number, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"the model's head_dim must be even, got {self.head_dim}")


def config_from_hf(fields: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json; the defaults of absent fields are transformers'."""
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if name not in fields:
            raise ModelError(f"config.json lacks {name}")
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {fields['hidden_act']!r} is not supported; supported: silu")
    if fields.get("quantization_config"):
        raise ModelError("config.json: quantization_config is not supported in safetensors; use a GGUF file")
    heads = fields["num_attention_heads"]
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or not isinstance(heads, int) or heads < 1:
        raise ModelError("config.json: num_attention_heads or the rope parameters cannot be used")
    max_positions = fields.get("max_position_embeddings", 2048)
    kv_heads = fields.get("num_key_value_heads")
    return LlamaConfig(
        model_type="llama",
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", fields.get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, max_positions),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
    )


def _rope_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling:
    kind = rope.get("rope_type", rope.get("type", "default"))
    supported = {member.value: member for member in RopeType}
    if kind not in supported:
        raise ModelError(f"config.json: rope scaling {kind!r} is not supported; supported: {', '.join(supported)}")
    wanted: dict[str, tuple[str, ...]] = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
    for name in wanted.get(kind, ()):
        if not isinstance(rope.get(name), (int, float)) or rope[name] <= 0:
            raise ModelError(f"config.json: rope scaling {kind} needs a positive {name}, got {rope.get(name)!r}")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind=RopeType.LINEAR, factor=float(rope["factor"]))
    return RopeScaling(
        kind=RopeType.LLAMA3,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope.get("original_max_position_embeddings") or max_positions),
    )
