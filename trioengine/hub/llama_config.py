"""The configuration of a Llama model: from a config.json or a GGUF file's metadata, and the tensors that it needs."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.core.gguf import Undecoded
from trioengine.core.wording import brief
from trioengine.hub.model_config import Fields, Shape

MODEL_TYPES = ("llama",)
FREQUENCY_DIVISORS = "rope_freqs.weight"  # [head_dim / 2]: llama3 scaling as llama.cpp stores it
TOKENS = "tokenizer.ggml.tokens"
MAX_PADDING = 4096  # rows of the embedding beyond the vocabulary; llama.cpp itself allows none
_OUTER = {  # GGUF names of tensors outside of the layers
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
_LAYER = {  # and of a layer
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


class RopeType(enum.Enum):
    """The scaling of rotary frequencies for long contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A scaling, with the names of config.json; `kind` decides which of the numbers are used."""

    kind: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0

    @classmethod
    def linear(cls, factor: float) -> RopeScaling:
        """Divide all frequencies by the factor."""
        return cls() if factor == 1 else cls(kind=RopeType.LINEAR, factor=factor)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama model; counts are at least 1."""

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
    attention_bias: bool  # of queries, keys and values
    output_bias: bool  # of the attention's output
    mlp_bias: bool

    @property
    def text(self) -> LlamaConfig:
        """The decoder: the whole model."""
        return self

    @property
    def images(self) -> None:
        """None: a model of texts only."""

    def wanted_tensors(self, prefix: str = "model.") -> dict[str, Shape]:
        """Return the shape of every tensor that the model needs, by its Hugging Face name; the head has no prefix."""
        vocabulary = (self.vocab_size, self.hidden_size)
        wanted: dict[str, Shape] = {f"{prefix}embed_tokens.weight": vocabulary, f"{prefix}norm.weight": vocabulary[1:]}
        if not self.tie_word_embeddings:
            wanted["lm_head.weight"] = vocabulary
        for index in range(self.num_layers):
            layer = f"{prefix}layers.{index}."
            wanted[layer + "input_layernorm.weight"] = vocabulary[1:]
            wanted[layer + "post_attention_layernorm.weight"] = vocabulary[1:]
            for name, shape, has_bias in _projections(self):
                wanted[f"{layer}{name}.weight"] = shape
                if has_bias:
                    wanted[f"{layer}{name}.bias"] = shape[:1]
        return wanted

    def optional_tensors(self) -> dict[str, Shape]:
        """Return the shapes of tensors that a checkpoint may have; a tied head is not read."""
        return {
            "lm_head.weight": (self.vocab_size, self.hidden_size),
            FREQUENCY_DIVISORS: (self.head_dim // 2,),
        }


def config_from_hf(fields: Fields, num_tensors: int) -> LlamaConfig:
    """Read config.json, with transformers' defaults for absent fields. Raises ModelError, naming the field."""
    if (activation := fields.get("hidden_act")) not in ("silu", None):
        raise ModelError(f"{fields.path}: hidden_act {brief(activation)} is not supported; supported: silu")
    if fields.get("quantization_config"):
        raise ModelError(f"{fields.path}: quantization_config is not supported in safetensors; use a GGUF file")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    max_positions = fields.count("max_position_embeddings")
    rope = fields.object("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    return LlamaConfig(
        model_type="llama",
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=count_layers(fields, "num_hidden_layers", num_tensors),
        num_heads=heads,
        num_kv_heads=count_kv_heads(fields, "num_key_value_heads", heads),
        head_dim=count_head_dim(fields, "head_dim", hidden // heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, max_positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        output_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )


def count_layers(fields: Fields, field: str, num_tensors: int, default: int | None = None) -> int:
    """Return the number of layers. Raises ModelError if it exceeds the number of tensors."""
    layers = fields.count(field, default)
    if layers > num_tensors:
        raise fields.bad(field, f"must be at most the number of tensors, {num_tensors}", default)
    return layers


def count_kv_heads(fields: Fields, field: str, heads: int) -> int:
    """Return the number of key-value heads, by default all heads. Raises ModelError unless it divides the heads."""
    kv_heads = fields.count(field, heads)
    if heads % kv_heads:
        raise fields.bad(field, f"must divide the number of heads, {heads}")
    return kv_heads


def count_head_dim(fields: Fields, field: str, default: int) -> int:
    """Return the size of a head. Raises ModelError if it is odd: rotary embeddings rotate pairs."""
    head_dim = fields.count(field, default)
    if head_dim % 2:
        raise fields.bad(field, "must be even", default)
    return head_dim


def _rope_scaling(rope: Fields, max_positions: int) -> RopeScaling:
    kind = rope.get("type") if rope.get("rope_type") is None else rope.get("rope_type")
    supported = {member.value: member for member in RopeType}
    if kind is None and rope.get("factor") is None:
        return RopeScaling()
    if not isinstance(kind, str) or kind not in supported:
        names = ", ".join(supported)
        raise ModelError(f"{rope.path}: rope scaling {brief(kind)} is not supported; supported: {names}")
    match supported[kind]:
        case RopeType.DEFAULT:
            return RopeScaling()
        case RopeType.LINEAR:
            return RopeScaling.linear(rope.number("factor"))
        case RopeType.LLAMA3:
            return _llama3(rope, max_positions)


def _llama3(rope: Fields, max_positions: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.bad("high_freq_factor", f"must be above low_freq_factor, {low}")
    return RopeScaling(
        kind=RopeType.LLAMA3,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.count("original_max_position_embeddings", max_positions),
    )


def _projections(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, int], bool]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "self_attn.q_proj", (queries, hidden), config.attention_bias
    yield "self_attn.k_proj", (keys, hidden), config.attention_bias
    yield "self_attn.v_proj", (keys, hidden), config.attention_bias
    yield "self_attn.o_proj", (hidden, queries), config.output_bias
    yield "mlp.gate_proj", (inner, hidden), config.mlp_bias
    yield "mlp.up_proj", (inner, hidden), config.mlp_bias
    yield "mlp.down_proj", (hidden, inner), config.mlp_bias


# ---- GGUF metadata ------------------------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; an unknown name is kept, and refused as unexpected."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
    return f"model.layers.{layer}.{_LAYER[stem]}.{kind}" if stem in _LAYER else name


def interleaved_heads(name: str, config: LlamaConfig) -> int | None:
    """Return the heads of a tensor whose rotary pairs llama.cpp stores side by side, by its Hugging Face name."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    return next((count for projection, count in heads.items() if f".{projection}." in name), None)


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path, model_type: str = "llama"
) -> LlamaConfig:
    """Read the metadata with the prefix `model_type`; the shapes, by GGUF names, give the vocabulary and the biases.

    Without an output tensor the head is tied. Raises ModelError, naming the key or the tensor.
    """
    prefix = f"{model_type}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(path, values, prefix)
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = count_head_dim(fields, "attention.key_length", hidden // heads)
    if fields.count("rope.dimension_count", head_dim) != head_dim:
        raise fields.bad("rope.dimension_count", f"must be the size of a head, {head_dim}")
    return LlamaConfig(
        model_type=model_type,
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
        rope_scaling=_gguf_rope_scaling(fields),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )


def _vocab_size(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> int:
    """Return the rows of the embedding: one for each token, and possibly some of padding."""
    if len(shapes.get(_EMBEDDING, ())) != 2:
        raise ModelError(f"{path}: tensor {_EMBEDDING} is missing or not a matrix")
    rows, tokens = shapes[_EMBEDDING][0], metadata.get(TOKENS)
    if isinstance(tokens, list | Undecoded) and not len(tokens) <= rows <= len(tokens) + MAX_PADDING:
        raise ModelError(f"{path}: {TOKENS} has {len(tokens)} tokens, {_EMBEDDING} {rows}")
    return rows


def _gguf_rope_scaling(fields: Fields) -> RopeScaling:
    """Read as llama.cpp does: linear by default, from the old key if the new one is absent; 0 means no scaling."""
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
