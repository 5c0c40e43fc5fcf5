"""The shape of a Phi-3 or Phi-4-mini model: joined projections, and a part of each head rotated (arXiv 2404.14219)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub import llama_config
from trioengine.hub.llama_config import LlamaConfig, count_head_dim, count_layers, gguf_fields, rope_of
from trioengine.hub.model_config import Fields, Shape
from trioengine.hub.rope_config import RopeScaling, RopeType, scaling_from_gguf, scaling_from_hf

MODEL_TYPES = ("phi3",)
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"  # of GGUF files
_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
_BIASES = {"attention_bias": False, "output_bias": False, "mlp_bias": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """The shape of a Phi-3 model."""

    def layer_tensors(self) -> dict[str, Shape]:
        tensors = LlamaConfig.layer_tensors(self)
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        for projection in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            del tensors[f"{projection}.weight"]
        return tensors | {
            "self_attn.qkv_proj.weight": (qkv, self.hidden_size),
            "mlp.gate_up_proj.weight": (2 * self.intermediate_size, self.hidden_size),
        }

    def optional_tensors(self) -> dict[str, Shape]:
        divisors = (self.rotary_dim // 2,)
        return {
            "lm_head.weight": (self.vocab_size, self.hidden_size),
            LONG_DIVISORS: divisors,
            SHORT_DIVISORS: divisors,
        }


def config_from_hf(fields: Fields, num_tensors: int) -> Phi3Config:
    """Read config.json. Raises ModelError, naming the field."""
    heads = fields.count("num_attention_heads")
    head_dim = count_head_dim(fields, "head_dim", fields.count("hidden_size") // heads)
    rope = rope_of(fields)
    if "yarn" in (rope.get("rope_type"), rope.get("type")):  # as old files call longrope
        rope = rope.without("rope_type", "type").defaulting({"rope_type": "longrope"})
    place = fields if rope.get("partial_rotary_factor") is None else rope
    share = place.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise place.bad("partial_rotary_factor", "must be at most 1")
    rotary_dim = int(head_dim * share)
    defaults = fields.defaulting(_DEFAULTS)
    window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
    return Phi3Config.from_hf(
        defaults,
        num_tensors,
        rotary_dim=rotary_dim,
        rope_scaling=scaling_from_hf(rope, defaults, fields.count("max_position_embeddings"), rotary_dim),
        windows=(window,) * count_layers(fields, "num_hidden_layers", num_tensors),
        **_BIASES,
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Phi3Config:
    """Read the `phi3.*` metadata. Raises ModelError, naming the key or the tensor."""
    fields = gguf_fields(metadata, path, "phi3")
    heads = fields.count("attention.head_count")
    head_dim = count_head_dim(fields, "attention.key_length", fields.count("embedding_length") // heads)
    window = fields.index("attention.sliding_window", 0) or None  # llama.cpp's conversion writes 0 for none
    return Phi3Config.from_gguf(
        metadata,
        shapes,
        path,
        "phi3",
        rotary_dim=fields.count("rope.dimension_count", head_dim),
        rope_scaling=_gguf_scaling(fields, has_divisors=LONG_DIVISORS in shapes),
        windows=(window,) * count_layers(fields, "block_count", len(shapes)),
        **_BIASES,
    )


def _gguf_scaling(fields: Fields, *, has_divisors: bool) -> RopeScaling:
    """Return longrope's numbers; its divisors are tensors."""
    max_positions = fields.count("context_length")
    if not has_divisors:
        return scaling_from_gguf(fields, max_positions)
    original = fields.count("rope.scaling.original_context_length", max_positions)
    if original < 2:
        raise fields.bad("rope.scaling.original_context_length", "must be at least 2", original)
    return RopeScaling(
        kind=RopeType.LONGROPE,
        factor=max_positions / original,
        original_max_position_embeddings=original,
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; the divisors of frequencies have none."""
    return name if name in (LONG_DIVISORS, SHORT_DIVISORS) else llama_config.hf_name(name, _LAYER_NAMES)
