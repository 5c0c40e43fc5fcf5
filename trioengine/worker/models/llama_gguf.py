"""What is different about a Llama in a GGUF file: the names, the metadata, and rotary pairs that lie side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trioengine.core.errors import ModelError
from trioengine.worker.layers.rotary import RopeScaling, RopeType
from trioengine.worker.models.llama_config import LlamaConfig

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",  # frequency divisors: how llama.cpp stores llama3 scaling
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
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that means nothing is kept, and refused as unexpected."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
    return f"model.layers.{layer}.{_LAYER[stem]}.{kind}" if stem in _LAYER else name


def from_gguf_layout(name: str, tensor: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Undo llama.cpp's permutation of the query and key rows: pairs (2i, 2i+1) become (i, i + head_dim / 2)."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    paired = tensor.view(heads, config.head_dim // 2, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> LlamaConfig:
    """Read the `llama.*` metadata; the shapes tell the vocabulary, whether the head is tied, and the biases."""

    if _EMBEDDING not in shapes or len(shapes[_EMBEDDING]) != 2:
        raise ModelError(f"{path}: tensor {_EMBEDDING} is missing or no matrix")

    def number(name: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{path}: the metadata field llama.{name} is missing or no number: {value!r}")
        return value

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // heads if heads else 0)
    if number("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: partial rotary embeddings (llama.rope.dimension_count) are not supported")
    return LlamaConfig(
        model_type="llama",
        vocab_size=shapes[_EMBEDDING][0],
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(metadata, path),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )


def _rope_scaling(metadata: Mapping[str, Any], path: Path) -> RopeScaling:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind in ("none", ""):
        return RopeScaling()
    if kind != "linear":
        raise ModelError(f"{path}: rope scaling {kind!r} is not supported in GGUF files; supported: none, linear")
    factor = metadata.get("llama.rope.scaling.factor")
    if not isinstance(factor, (int, float)) or factor <= 0:
        raise ModelError(
            f"{path}: the metadata field llama.rope.scaling.factor must be a positive number, got {factor!r}"
        )
    return RopeScaling(kind=RopeType.LINEAR, factor=float(factor))
