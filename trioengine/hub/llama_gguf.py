"""The names and the metadata of a Llama model in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trioengine.core.bounds import brief
from trioengine.core.errors import ModelError
from trioengine.core.gguf import Undecoded
from trioengine.hub.fields import Fields
from trioengine.hub.llama_config import (
    LlamaConfig,
    RopeScaling,
    Shape,
    count_head_dim,
    count_kv_heads,
    count_layers,
)

TOKENS = "tokenizer.ggml.tokens"
MAX_PADDING = 4096  # rows of the embedding beyond the vocabulary; llama.cpp itself allows none

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING = "token_embd.weight"
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", re.ASCII)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that means nothing is kept, and refused as unexpected."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
    return f"model.layers.{layer}.{_LAYER[stem]}.{kind}" if stem in _LAYER else name


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> LlamaConfig:
    """Read the `llama.*` metadata; the shapes, by GGUF names, give the vocabulary, a tied head, and the biases.

    Raises ModelError, naming the key or the tensor.
    """
    prefix = "llama."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(path, values, prefix)
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = count_head_dim(fields, "attention.key_length", hidden // heads)
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.bad("rope.dimension_count", f"must be the size of a head, {head_dim}")
    return LlamaConfig(
        model_type="llama",
        vocab_size=_vocab_size(metadata, shapes, path),
        hidden_size=hidden,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=count_layers(fields, "block_count", len(shapes)),
        num_heads=heads,
        num_kv_heads=count_kv_heads(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=fields.count("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )


def _vocab_size(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> int:
    """The rows of the embedding: the tokens, and perhaps some rows of padding."""
    if len(shapes.get(_EMBEDDING, ())) != 2:
        raise ModelError(f"{path}: tensor {_EMBEDDING} is missing or no matrix")
    rows, tokens = shapes[_EMBEDDING][0], metadata.get(TOKENS)
    if isinstance(tokens, list | Undecoded) and not len(tokens) <= rows <= len(tokens) + MAX_PADDING:
        raise ModelError(f"{path}: {TOKENS} has {len(tokens)} tokens, {_EMBEDDING} {rows}")
    return rows


def _rope_scaling(fields: Fields) -> RopeScaling:
    """As llama.cpp reads it: linear by default, by the old key where the new one is absent, and 0 scales nothing."""
    kind = fields.get("rope.scaling.type")
    if kind not in (None, "", "none", "linear"):
        named = f"rope scaling {brief(kind)}"
        raise ModelError(f"{fields.path}: {named} is not supported in GGUF files; supported: none, linear")
    if kind in ("none", ""):
        return RopeScaling()
    key = "rope.scale_linear" if fields.get("rope.scaling.factor") is None else "rope.scaling.factor"
    return RopeScaling() if _is_zero(fields.get(key)) else RopeScaling.linear(fields.number(key, 1.0))


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0
