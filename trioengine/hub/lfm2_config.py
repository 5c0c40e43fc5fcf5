"""The shape of an LFM2 model: short convolutions in place of attention in most layers (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.hub import llama_config
from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig, count_layers, gguf_fields, rope_of
from trioengine.hub.model_config import Fields, Shape, StatePart

MODEL_TYPES = ("lfm2",)
_LAYER_NAMES = {
    **LAYER_NAMES,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "ffn_norm": "ffn_norm",
}
_NORM = "token_embd_norm.weight"  # of the last layer's result, whatever its name
_DEFAULTS = {"norm_eps": 1e-5, "max_position_embeddings": 128000, "num_key_value_heads": 8}
_MAX_TAPS = 64
_ATTENTION = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(LlamaConfig):
    """The shape of an LFM2 model."""

    attends: tuple[bool, ...]  # whether each layer has attention; else it has a convolution
    num_taps: int  # of a convolution: tokens that it reads, the token itself among them
    convolution_bias: bool  # also of the products before and behind it

    @property
    def num_kv_layers(self) -> int:
        return self.attends.count(True)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        return (StatePart((self.num_taps - 1, self.hidden_size)),) * self.attends.count(False)

    def wanted_tensors(self, prefix: str = "model.") -> dict[str, Shape]:
        vocabulary = (self.vocab_size, self.hidden_size)
        wanted: dict[str, Shape] = {
            f"{prefix}embed_tokens.weight": vocabulary,
            f"{prefix}embedding_norm.weight": vocabulary[1:],
        }
        if not self.tie_word_embeddings:
            wanted["lm_head.weight"] = vocabulary
        for index, attends in enumerate(self.attends):
            mixer = self._attention() if attends else self._convolution()
            for name, shape in (mixer | self._feed_forward()).items():
                wanted[f"{prefix}layers.{index}.{name}"] = shape
        return wanted

    def _convolution(self) -> dict[str, Shape]:
        hidden = self.hidden_size
        tensors: dict[str, Shape] = {
            "conv.conv.weight": (hidden, 1, self.num_taps),
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.out_proj.weight": (hidden, hidden),
        }
        if self.convolution_bias:
            tensors |= {
                "conv.conv.bias": (hidden,),
                "conv.in_proj.bias": (3 * hidden,),
                "conv.out_proj.bias": (hidden,),
            }
        return tensors

    def _attention(self) -> dict[str, Shape]:
        hidden, queries = self.hidden_size, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.out_proj.weight": (hidden, queries),
            "self_attn.q_layernorm.weight": (self.head_dim,),
            "self_attn.k_layernorm.weight": (self.head_dim,),
        }

    def _feed_forward(self) -> dict[str, Shape]:
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "operator_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
            "feed_forward.w1.weight": (inner, hidden),
            "feed_forward.w2.weight": (hidden, inner),
            "feed_forward.w3.weight": (inner, hidden),
        }


def config_from_hf(fields: Fields, num_tensors: int) -> Lfm2Config:
    """Read config.json. Raises ModelError, naming the field."""
    given = fields.defaulting(_DEFAULTS)
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", default=True))
    rope_theta = rope_of(fields).number("rope_theta", fields.number("rope_theta", 1e6))
    return Lfm2Config.from_hf(
        given.defaulting({"intermediate_size": _feed_forward_size(fields)}),
        num_tensors,
        intermediate_size=_feed_forward_size(fields),
        rms_norm_eps=given.number("norm_eps"),
        rope_theta=rope_theta,
        tie_word_embeddings=tied,
        attends=_attends(fields, count_layers(fields, "num_hidden_layers", num_tensors)),
        num_taps=count_taps(fields, "conv_L_cache", 3),
        convolution_bias=fields.flag("conv_bias"),
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Lfm2Config:
    """Read the `lfm2.*` metadata; the tensors show which layers have attention. Raises ModelError, naming the key."""
    fields = gguf_fields(metadata, path, "lfm2")
    num_layers = count_layers(fields, "block_count", len(shapes))
    keys = [shapes.get(f"blk.{index}.attn_k.weight") for index in range(num_layers)]
    rows = next((shape[0] for shape in keys if shape), 0)
    head_dim = fields.count("embedding_length") // fields.count("attention.head_count")
    kv_heads = max(1, rows // max(1, head_dim))  # the metadata have an array, with 0 for a convolution
    return Lfm2Config.from_gguf(
        {**metadata, "lfm2.attention.head_count_kv": kv_heads},
        shapes,
        path,
        "lfm2",
        attends=checked_attention(fields, tuple(shape is not None for shape in keys)),
        num_taps=count_taps(fields, "shortconv.l_cache"),
        convolution_bias="blk.0.shortconv.conv.bias" in shapes,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    if name == _NORM:
        return "model.embedding_norm.weight"
    block, _, tensor = name.partition(".shortconv.")
    if tensor:
        return f"{block.replace('blk', 'model.layers', 1)}.conv.{tensor}"
    return llama_config.hf_name(name, _LAYER_NAMES)


def _feed_forward_size(fields: Fields) -> int:
    """Return the size of the gates, which config.json may give before an adjustment."""
    field = "block_ff_dim" if fields.get("block_ff_dim") is not None else "intermediate_size"
    size = fields.count(field, 12288)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    if fields.has("block_ffn_dim_multiplier") and fields.get("block_ffn_dim_multiplier") is None:
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    multiple = fields.count("block_multiple_of", 256)
    return max(1, -(-size // multiple)) * multiple


def _attends(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    indices = fields.get("full_attn_idxs")
    if indices is not None and not (isinstance(indices, list) and all(type(index) is int for index in indices)):
        raise fields.bad("full_attn_idxs", "must be a list of layers")
    attends = set(range(num_layers) if indices is None else indices)
    kinds = ["full_attention" if index in attends else "conv" for index in range(num_layers)]
    return attention_layers(fields, num_layers, "conv", kinds)


def attention_layers(fields: Fields, num_layers: int, other: str, kinds: Sequence[str]) -> tuple[bool, ...]:
    """Return whether each layer has attention, by config.json's `layer_types`, or else by `kinds`.

    The kinds are full_attention and `other`. Raises ModelError, naming the field.
    """
    given = fields.get("layer_types")
    kinds, supported = (kinds if given is None else given), (_ATTENTION, other)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in supported for kind in kinds):
        raise fields.bad("layer_types", f"must be {num_layers} of {', '.join(supported)}")
    return checked_attention(fields, tuple(kind == _ATTENTION for kind in kinds))


def checked_attention(fields: Fields, attends: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return whether each layer has attention. Raises ModelError if none has."""
    if not any(attends):
        raise ModelError(f"{fields.path}: a model without a layer of attention is not supported")
    return attends


def count_taps(fields: Fields, field: str, default: int | None = None) -> int:
    """Return the tokens that a convolution reads. Raises ModelError, naming the field."""
    count = fields.count(field, default)
    if not 2 <= count <= _MAX_TAPS:
        raise fields.bad(field, f"must be from 2 to {_MAX_TAPS}", default)
    return count
