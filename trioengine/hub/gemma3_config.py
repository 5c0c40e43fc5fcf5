"""The shape of a Gemma 3 model of texts: windows by layer, two rotary tables, four norms a layer (arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.core.wording import brief
from trioengine.hub import llama_config
from trioengine.hub.gguf_tensors import StoredForm
from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig, count_layers, gguf_fields, windows_of
from trioengine.hub.model_config import Fields, Shape
from trioengine.hub.rope_config import scaling_from_hf

MODEL_TYPES = ("gemma3_text",)
GGUF_TYPES = ("gemma3",)
_LAYER_NAMES = {
    **LAYER_NAMES,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PATTERN = 6  # every so many layers one sees the whole context
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_LAYERS_OF_27B = 62  # in which queries are scaled by the width of a head in the embedding: llama.cpp has no key for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(LlamaConfig):
    """The shape of a Gemma 3 model; layers without a window have `rope_theta` and `rope_scaling`."""

    local_rope_theta: float  # of layers with a window
    query_pre_attn_scalar: float  # queries are divided by its root

    def layer_tensors(self) -> dict[str, Shape]:
        norm, head = (self.hidden_size,), (self.head_dim,)
        return LlamaConfig.layer_tensors(self) | {
            "pre_feedforward_layernorm.weight": norm,
            "post_feedforward_layernorm.weight": norm,
            "self_attn.q_norm.weight": head,
            "self_attn.k_norm.weight": head,
        }


def config_from_hf(fields: Fields, num_tensors: int) -> Gemma3Config:
    """Read config.json. Raises ModelError, naming the field."""
    if (activation := fields.get("hidden_activation")) not in ("gelu_pytorch_tanh", None):
        named = f"hidden_activation {brief(activation)}"
        raise ModelError(f"{fields.path}: {named} is not supported; supported: gelu_pytorch_tanh")
    if fields.get("use_bidirectional_attention"):
        raise ModelError(f"{fields.path}: use_bidirectional_attention is not supported")
    fields.count("num_key_value_heads")  # transformers' default is 4, and not the number of heads
    fields = fields.defaulting(_DEFAULTS)
    num_layers = count_layers(fields, "num_hidden_layers", num_tensors)
    pattern = fields.count("sliding_window_pattern", _PATTERN)
    rope = fields.object("rope_parameters")
    whole, local = rope.object("full_attention"), rope.object("sliding_attention")
    if fields.get("rope_scaling"):  # of old files: of the layers without a window
        whole = fields.object("rope_scaling", {"rope_theta": whole.get("rope_theta")})
    if local.get("rope_type") not in (None, "default"):
        raise local.bad("rope_type", "must be default")
    max_positions = fields.count("max_position_embeddings")
    return Gemma3Config.from_hf(
        fields.without("hidden_act", "rope_parameters", "rope_scaling"),
        num_tensors,
        windows=windows_of(fields.defaulting({"sliding_window": 4096}), num_layers, lambda i: (i + 1) % pattern != 0),
        rope_theta=whole.number("rope_theta", fields.number("rope_theta", _THETA)),
        rope_scaling=scaling_from_hf(whole, fields, max_positions, fields.count("head_dim")),
        local_rope_theta=local.number("rope_theta", fields.number("rope_local_base_freq", _LOCAL_THETA)),
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar", 256.0),
        mlp_bias=False,
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Gemma3Config:
    """Read the `gemma3.*` metadata. Raises ModelError, naming the key or the tensor."""
    fields = gguf_fields(metadata, path, "gemma3")
    num_layers = count_layers(fields, "block_count", len(shapes))
    window = fields.count("attention.sliding_window")
    width = fields.count("embedding_length") // fields.count("attention.head_count")
    scalar = width if num_layers == _LAYERS_OF_27B else fields.count("attention.key_length", width)
    return Gemma3Config.from_gguf(
        metadata,
        shapes,
        path,
        "gemma3",
        model_type="gemma3_text",
        windows=tuple(window if (index + 1) % _PATTERN else None for index in range(num_layers)),
        rope_theta=fields.number("rope.freq_base", _THETA),
        local_rope_theta=fields.number("rope.freq_base_swa", _LOCAL_THETA),
        query_pre_attn_scalar=float(scalar),
    )


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return llama_config.hf_name(name, _LAYER_NAMES)


def stored_form(name: str) -> StoredForm:
    """Return how llama.cpp stores a tensor: weights of norms with the 1 of their formula."""
    return StoredForm.PLUS_ONE if name.endswith("norm.weight") else StoredForm.SAME
