"""The configuration of a Llama model: from a config.json or a GGUF file's metadata, and the tensors that it needs.

Other decoders of its kind have a configuration derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from trioengine.core.errors import ModelError
from trioengine.core.gguf import Undecoded
from trioengine.core.wording import brief
from trioengine.hub.model_config import Fields, JoinedTensor, Rows, Shape, StatePart
from trioengine.hub.rope_config import RopeScaling, RopeType, scaling_from_gguf, scaling_from_hf

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
LAYER_NAMES = {  # and of a layer
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
ConfigT = TypeVar("ConfigT", bound="LlamaConfig")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    rotary_dim: int  # elements of a head that are rotated
    windows: tuple[int | None, ...]  # of each layer: the tokens that a query sees, itself among them; None: all before
    tie_word_embeddings: bool
    attention_bias: bool  # of queries, keys and values
    output_bias: bool  # of the attention's output
    mlp_bias: bool
    embeds: bool = False  # an embedding model: hidden states are its results, and it counts as tied, without a head

    @property
    def text(self) -> Self:
        """The decoder: the whole model."""
        return self

    @property
    def images(self) -> None:
        """None: a model of texts only."""

    @property
    def num_kv_layers(self) -> int:
        """The layers with keys and values: all."""
        return self.num_layers

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The parts of a sequence's state: none."""
        return ()

    @property
    def has_states(self) -> bool:
        """Whether a layer has a state."""
        return bool(self.state_parts)

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts in place of one MLP: False."""
        return False

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The beginnings of the names of tensors that are not read: none."""
        return ()

    def wanted_tensors(self, prefix: str = "model.") -> dict[str, Shape]:
        """Return the shape of every tensor that the model needs, by its Hugging Face name; the head has no prefix."""
        vocabulary = (self.vocab_size, self.hidden_size)
        wanted: dict[str, Shape] = {f"{prefix}embed_tokens.weight": vocabulary, f"{prefix}norm.weight": vocabulary[1:]}
        if not self.tie_word_embeddings:
            wanted["lm_head.weight"] = vocabulary
        for index in range(self.num_layers):
            for name, shape in self.tensors_of(index).items():
                wanted[f"{prefix}layers.{index}.{name}"] = shape
        return wanted

    def tensors_of(self, index: int) -> dict[str, Shape]:
        """Return the shapes of the tensors of one layer: of every layer the same."""
        return self.layer_tensors()

    def layer_tensors(self) -> dict[str, Shape]:
        """Return the shapes of a layer's tensors, by their names behind the layer's."""
        norm = (self.hidden_size,)
        return {
            "input_layernorm.weight": norm,
            "post_attention_layernorm.weight": norm,
            **dict(self._projections()),
        }

    def _projections(self) -> Iterator[tuple[str, Shape]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", queries, hidden, self.attention_bias),
            ("self_attn.k_proj", keys, hidden, self.attention_bias),
            ("self_attn.v_proj", keys, hidden, self.attention_bias),
            ("self_attn.o_proj", hidden, queries, self.output_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            yield f"{name}.weight", (rows, columns)
            if has_bias:
                yield f"{name}.bias", (rows,)

    def optional_tensors(self) -> dict[str, Shape]:
        """Return the shapes of tensors that a checkpoint may have; a tied head is not read."""
        return {
            "lm_head.weight": (self.vocab_size, self.hidden_size),
            FREQUENCY_DIVISORS: (self.rotary_dim // 2,),
        }

    def joined_tensors(self) -> Iterator[JoinedTensor]:
        """Yield the tensors that a directory or a GGUF file may have in place of several: none."""
        return iter(())

    @classmethod
    def from_hf(cls, fields: Fields, num_tensors: int, **more: Any) -> Self:
        """Read config.json, with transformers' defaults for absent fields. Raises ModelError, naming the field.

        `more` are the values of fields that config.json has in another form, or not at all.
        """
        if (activation := fields.get("hidden_act")) not in ("silu", None):
            raise ModelError(f"{fields.path}: hidden_act {brief(activation)} is not supported; supported: silu")
        if fields.get("quantization_config"):
            raise ModelError(f"{fields.path}: quantization_config is not supported in safetensors; use a GGUF file")
        for field in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.get(field):
                raise ModelError(f"{fields.path}: {field} is not supported")
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        num_layers = count_layers(fields, "num_hidden_layers", num_tensors)
        head_dim = count_head_dim(fields, "head_dim", hidden // heads)
        max_positions = fields.count("max_position_embeddings")
        rope = rope_of(fields)
        if "rotary_dim" not in more:
            _refuse_partial_rotation(fields, rope)
        scaling = more.get("rope_scaling") or scaling_from_hf(rope, fields, max_positions, head_dim)
        values: dict[str, Any] = {
            "model_type": fields.get("model_type"),
            "vocab_size": fields.count("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": fields.count("intermediate_size"),
            "num_layers": num_layers,
            "num_heads": heads,
            "num_kv_heads": count_kv_heads(fields, "num_key_value_heads", heads),
            "head_dim": head_dim,
            "max_position_embeddings": scaling.max_positions(max_positions),
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "rope_theta": rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
            "rope_scaling": scaling,
            "rotary_dim": head_dim,
            "windows": (None,) * num_layers,
            "tie_word_embeddings": fields.flag("tie_word_embeddings"),
            "attention_bias": fields.flag("attention_bias"),
            "output_bias": fields.flag("attention_bias"),
            "mlp_bias": fields.flag("mlp_bias"),
        }
        return _checked(cls(**values | more), fields)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path, architecture: str, **more: Any
    ) -> Self:
        """Read the metadata with the prefix `architecture`; the shapes give the vocabulary and the biases.

        `shapes` has GGUF's names. Without an output tensor the head is tied. `more` are values of fields, as in
        `from_hf`. Raises ModelError, naming the key or the tensor.
        """
        fields = gguf_fields(metadata, path, architecture)
        heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
        num_layers = count_layers(fields, "block_count", len(shapes))
        head_dim = count_head_dim(fields, "attention.key_length", hidden // heads)
        if "rotary_dim" not in more and fields.count("rope.dimension_count", head_dim) != head_dim:
            raise fields.bad("rope.dimension_count", f"must be the size of a head, {head_dim}")
        max_positions = fields.count("context_length")
        scaling = more.get("rope_scaling") or scaling_from_gguf(fields, max_positions)
        values: dict[str, Any] = {
            "model_type": architecture,
            "vocab_size": _vocab_size(metadata, shapes, path),
            "hidden_size": hidden,
            "intermediate_size": fields.count("feed_forward_length"),
            "num_layers": num_layers,
            "num_heads": heads,
            "num_kv_heads": count_kv_heads(fields, "attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": scaling.max_positions(max_positions),
            "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": fields.number("rope.freq_base", 10000.0),
            "rope_scaling": scaling,
            "rotary_dim": head_dim,
            "windows": (None,) * num_layers,
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
            "output_bias": "blk.0.attn_output.bias" in shapes,
            "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        }
        return _checked(cls(**values | more), fields)


def config_from_hf(fields: Fields, num_tensors: int) -> LlamaConfig:
    """Read config.json. Raises ModelError, naming the field."""
    return LlamaConfig.from_hf(fields, num_tensors)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> LlamaConfig:
    """Read the `llama.*` metadata. Raises ModelError, naming the key or the tensor."""
    return LlamaConfig.from_gguf(metadata, shapes, path, "llama")


def rope_of(fields: Fields) -> Fields:
    """Return the object of rotary positions; old config.json files name it rope_scaling, which comes first."""
    return fields.object("rope_scaling" if fields.get("rope_scaling") else "rope_parameters")


def _refuse_partial_rotation(fields: Fields, rope: Fields) -> None:
    for place in (fields, rope):
        if place.number("partial_rotary_factor", 1.0) != 1:
            raise place.bad("partial_rotary_factor", "must be 1")


def _checked(config: ConfigT, fields: Fields) -> ConfigT:
    """Return the configuration. Raises ModelError if its rotation cannot be computed."""
    if config.rope_scaling.kind is RopeType.YARN and config.rope_theta <= 1:
        raise ModelError(
            f"{fields.path}: the base of rotary positions must be above 1 for yarn, got {config.rope_theta}"
        )
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        size = f"an even number of a head's {config.head_dim} elements"
        raise ModelError(f"{fields.path}: the rotation must turn {size}, got {config.rotary_dim}")
    return config


def windows_of(fields: Fields, num_layers: int, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the window of each layer, by config.json's `layer_types`, or by `is_sliding` of the layer's index."""
    given = fields.get("layer_types")
    kinds = (
        ["sliding_attention" if is_sliding(index) else "full_attention" for index in range(num_layers)]
        if given is None
        else given
    )
    supported = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in supported for kind in kinds):
        raise fields.bad("layer_types", f"must be {num_layers} of {', '.join(supported)}")
    return tuple(fields.count("sliding_window") if kind == "sliding_attention" else None for kind in kinds)


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


# ---- GGUF metadata ------------------------------------------------------------------------------------------------


def hf_name(name: str, layer_names: Mapping[str, str] = LAYER_NAMES) -> str:
    """Return the Hugging Face name of a GGUF tensor; an unknown name is kept, and refused as unexpected."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name
    return f"model.layers.{layer}.{layer_names[stem]}.{kind}" if stem in layer_names else name


def stored_rows(name: str, config: LlamaConfig) -> Rows | None:
    """Return the rows of a tensor, by its Hugging Face name, in a file with each head's rotary pairs side by side."""
    heads, size = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}, config.head_dim
    count = next((count for projection, count in heads.items() if f".{projection}." in name), 0)
    firsts = (start + place for start in range(0, count * size, size) for place in (0, 1))
    return tuple(range(first, first + size - first % 2, 2) for first in firsts) or None


def gguf_fields(metadata: Mapping[str, Any], path: Path, architecture: str) -> Fields:
    """Return the fields with the prefix `architecture`."""
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Fields(path, values, prefix)


def _vocab_size(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> int:
    """Return the rows of the embedding: one for each token, and possibly some of padding."""
    if len(shapes.get(_EMBEDDING, ())) != 2:
        raise ModelError(f"{path}: tensor {_EMBEDDING} is missing or not a matrix")
    rows, tokens = shapes[_EMBEDDING][0], metadata.get(TOKENS)
    if isinstance(tokens, list | Undecoded) and not len(tokens) <= rows <= len(tokens) + MAX_PADDING:
        raise ModelError(f"{path}: {TOKENS} has {len(tokens)} tokens, {_EMBEDDING} {rows}")
    return rows
