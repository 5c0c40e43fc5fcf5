"""The shape of a dense Qwen3.5 of texts: most layers have gated delta nets (arXiv 2412.06464), the others attention.

A checkpoint with a vision tower is read for texts: the tower is ignored, and so are layers that predict more tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trioengine.hub import llama_config
from trioengine.hub.gguf_tensors import StoredForm
from trioengine.hub.lfm2_config import attention_layers, checked_attention, count_taps
from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig, count_layers, gguf_fields, rope_of
from trioengine.hub.model_config import Fields, Rows, Shape, StatePart
from trioengine.hub.qwen3_config import HEAD_NORM_NAMES
from trioengine.hub.rope_config import scaling_from_hf

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
GGUF_TYPES = ("qwen35",)
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
TEXT_PREFIX = "model.language_model."  # of names in a checkpoint with a vision tower
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 32768}  # transformers'
GGUF_NAMES = {
    **LAYER_NAMES,
    **HEAD_NORM_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_STEMS = {"a": "A_log", "dt.bias": "dt_bias"}  # which have another form
_ROTATED = 0.25  # of a head
_INTERVAL = 4  # every so many layers one has attention
_MAX_DELTA_DIM = 256  # delta.h's


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """The heads of a gated delta net, and the convolution before it."""

    num_key_heads: int
    num_value_heads: int  # a multiple of these
    key_dim: int
    value_dim: int
    num_taps: int  # tokens that the convolution reads, the token itself among them

    @property
    def values(self) -> int:
        """The elements of all values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """The elements of all queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def state_parts(self) -> tuple[StatePart, StatePart]:
        """The last inputs of the convolution, and a matrix for each head of values."""
        matrices = (self.num_value_heads, self.key_dim, self.value_dim)
        return StatePart((self.num_taps - 1, self.convolved)), StatePart(matrices, is_float32=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35Config(LlamaConfig):
    """The shape of a Qwen3.5 model."""

    attends: tuple[bool, ...]  # whether each layer has attention; else it has a delta net
    delta: DeltaShape
    num_ignored: int = field(default=0, compare=False)  # layers behind these, in GGUF files, which predict more tokens

    @property
    def num_kv_layers(self) -> int:
        return self.attends.count(True)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        return self.delta.state_parts * self.attends.count(False)

    @property
    def prefix(self) -> str:
        """The beginning of the names of all tensors but the head's."""
        return TEXT_PREFIX if self.model_type in _WITH_IMAGES else "model."

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        behind = range(self.num_layers, self.num_layers + self.num_ignored)
        layers = (f"{layer}{index}." for index in behind for layer in ("model.layers.", "blk."))
        return ("mtp.", "model.visual.", *layers)

    def wanted_tensors(self, prefix: str = "model.") -> dict[str, Shape]:
        return LlamaConfig.wanted_tensors(self, self.prefix)

    def tensors_of(self, index: int) -> dict[str, Shape]:
        tensors = LlamaConfig.layer_tensors(self)
        attention = {name: shape for name, shape in tensors.items() if name.startswith("self_attn.")}
        others = {name: shape for name, shape in tensors.items() if name not in attention}
        return others | (self._gated(attention) if self.attends[index] else self._delta_net())

    def _gated(self, attention: dict[str, Shape]) -> dict[str, Shape]:
        """Return the tensors of attention in which a gate follows each head of queries."""
        for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias"):
            if name in attention:
                rows, *columns = attention[name]
                attention[name] = (2 * rows, *columns)
        head = (self.head_dim,)
        return attention | {"self_attn.q_norm.weight": head, "self_attn.k_norm.weight": head}

    def _delta_net(self) -> dict[str, Shape]:
        hidden, delta = self.hidden_size, self.delta
        heads = delta.num_value_heads
        return {
            "linear_attn.in_proj_qkv.weight": (delta.convolved, hidden),
            "linear_attn.in_proj_z.weight": (delta.values, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (delta.convolved, 1, delta.num_taps),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (delta.value_dim,),
            "linear_attn.out_proj.weight": (hidden, delta.values),
        }


def config_from_hf(fields: Fields, num_tensors: int) -> Qwen35Config:
    """Read config.json, or its `text_config`, if it has a vision tower. Raises ModelError, naming the field."""
    text = decoder_fields(fields).defaulting(DEFAULTS)
    model_type = fields.string("model_type")
    return Qwen35Config.from_hf(text, num_tensors, model_type=model_type, **hybrid_values(text, num_tensors))


def decoder_fields(fields: Fields) -> Fields:
    """Return the fields of the decoder."""
    if fields.string("model_type") not in _WITH_IMAGES:
        return fields
    return fields.object("text_config", {"tie_word_embeddings": fields.flag("tie_word_embeddings")})


def hybrid_values(fields: Fields, num_tensors: int) -> dict[str, Any]:
    """Return the values of a decoder with delta nets for `LlamaConfig.from_hf`. Raises ModelError, naming the field."""
    if not fields.flag("attn_output_gate", default=True):
        raise fields.bad("attn_output_gate", "must be true")
    num_layers = count_layers(fields, "num_hidden_layers", num_tensors)
    interval = fields.count("full_attention_interval", _INTERVAL)
    kinds = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    rope = rope_of(fields)
    place = fields if rope.get("partial_rotary_factor") is None else rope
    share = place.number("partial_rotary_factor", _ROTATED)
    if share > 1:
        raise place.bad("partial_rotary_factor", "must be at most 1")
    rotary_dim = int(fields.count("head_dim") * share)
    return {
        "rotary_dim": rotary_dim,
        "rope_scaling": scaling_from_hf(rope, fields, fields.count("max_position_embeddings"), rotary_dim),
        "attends": attention_layers(fields, num_layers, "linear_attention", kinds),
        "delta": _delta_shape(fields),
        "mlp_bias": False,
    }


def _delta_shape(fields: Fields) -> DeltaShape:
    key_heads, value_heads = fields.count("linear_num_key_heads", 16), fields.count("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.bad("linear_num_value_heads", f"must be a multiple of the heads of keys, {key_heads}", value_heads)
    return DeltaShape(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=_head_dim(fields, "linear_key_head_dim"),
        value_dim=_head_dim(fields, "linear_value_head_dim"),
        num_taps=count_taps(fields, "linear_conv_kernel_dim", 4),
    )


# ---- GGUF files: llama.cpp's conversion puts the heads of values that share no head of keys side by side -----------


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Qwen35Config:
    """Read the `qwen35.*` metadata. Raises ModelError, naming the key or the tensor."""
    values = hybrid_gguf_values(gguf_fields(metadata, path, "qwen35"), shapes)
    return Qwen35Config.from_gguf(metadata, shapes, path, "qwen35", model_type="qwen3_5_text", **values)


def hybrid_gguf_values(fields: Fields, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the values of a decoder with delta nets for `LlamaConfig.from_gguf`. Raises ModelError, naming the key."""
    num_ignored = fields.index("nextn_predict_layers", 0)
    if num_ignored > 1:  # llama.cpp's own limit
        raise fields.bad("nextn_predict_layers", "must be at most 1")
    num_layers = count_layers(fields, "block_count", len(shapes)) - num_ignored
    interval = fields.count("full_attention_interval", _INTERVAL)
    attends = tuple((index + 1) % interval == 0 for index in range(num_layers))
    first = checked_attention(fields, attends).index(True)
    return {
        "num_layers": num_layers,
        "windows": (None,) * num_layers,
        "rotary_dim": fields.count("rope.dimension_count"),
        "attends": attends,
        "delta": _delta_from_gguf(fields),
        "num_ignored": num_ignored,
        "attention_bias": f"blk.{first}.attn_q.bias" in shapes,
        "output_bias": f"blk.{first}.attn_output.bias" in shapes,
        "mlp_bias": False,
    }


def _delta_from_gguf(fields: Fields) -> DeltaShape:
    key_heads, value_heads = fields.count("ssm.group_count"), fields.count("ssm.time_step_rank")
    if value_heads % key_heads:
        raise fields.bad("ssm.time_step_rank", f"must be a multiple of the heads of keys, {key_heads}")
    values, most = fields.count("ssm.inner_size"), value_heads * _MAX_DELTA_DIM
    if values % value_heads:
        raise fields.bad("ssm.inner_size", f"must be a multiple of the heads of values, {value_heads}")
    if values > most:
        raise fields.bad("ssm.inner_size", f"must be at most {most}")
    return DeltaShape(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=_head_dim(fields, "ssm.state_size"),
        value_dim=values // value_heads,
        num_taps=count_taps(fields, "ssm.conv_kernel"),
    )


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return hybrid_hf_name(name, GGUF_NAMES)


def hybrid_hf_name(name: str, names: Mapping[str, str]) -> str:
    """Return the Hugging Face name of a GGUF tensor; `names` has all names of a layer but two."""
    block, _, stem = name.rpartition(".ssm_")
    if stem in _STEMS and block:
        return f"{block.replace('blk', 'model.layers', 1)}.linear_attn.{_STEMS[stem]}"
    return llama_config.hf_name(name, names)


def stored_rows(name: str, config: Qwen35Config) -> Rows | None:
    """Return the rows of a tensor in the file, by its Hugging Face name."""
    delta, kind = config.delta, name.rpartition("linear_attn.")[2]
    if name == kind or delta.num_key_heads == delta.num_value_heads:
        return None
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        start = 2 * delta.num_key_heads * delta.key_dim
        return range(start), *_tiled(delta, delta.value_dim, start)
    if kind == "in_proj_z.weight":
        return _tiled(delta, delta.value_dim)
    return _tiled(delta, 1) if kind in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias") else None


def stored_columns(name: str, config: Qwen35Config) -> Rows | None:
    """Return the columns of a tensor in the file, by its Hugging Face name."""
    delta = config.delta
    is_moved = name.endswith("linear_attn.out_proj.weight") and delta.num_key_heads != delta.num_value_heads
    return _tiled(delta, delta.value_dim) if is_moved else None


def _tiled(delta: DeltaShape, size: int, start: int = 0) -> Rows:
    """Return the places of the heads of values in a file that has first the first one of each head of keys."""
    step, end = delta.num_key_heads * size, start + delta.num_value_heads * size
    return tuple(
        range(place, place + size) for first in range(start, start + step, size) for place in range(first, end, step)
    )


def stored_form(name: str) -> StoredForm:
    """Return how llama.cpp stores a tensor: weights of norms with the 1 of their formula, rates without a logarithm."""
    if name.endswith("linear_attn.A_log"):
        return StoredForm.MINUS_EXPONENTIAL
    is_plus_one = name.endswith("norm.weight") and "linear_attn" not in name
    return StoredForm.PLUS_ONE if is_plus_one else StoredForm.SAME


def _head_dim(fields: Fields, field: str) -> int:
    size = fields.count(field, 128)
    if size > _MAX_DELTA_DIM:
        raise fields.bad(field, f"must be at most {_MAX_DELTA_DIM}")
    return size
