"""The shape of a dense Qwen3.5 of texts: most layers have gated delta nets (arXiv 2412.06464), the others attention.

A checkpoint with a vision tower is read for texts: the tower is ignored, and so are layers that predict more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trioengine.hub.lfm2_config import attention_layers, count_taps
from trioengine.hub.llama_config import LlamaConfig, count_layers, rope_of
from trioengine.hub.model_config import Fields, Shape, StatePart
from trioengine.hub.rope_config import scaling_from_hf

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
TEXT_PREFIX = "model.language_model."  # of names in a checkpoint with a vision tower
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 32768}  # transformers'
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
        return ("mtp.", "model.visual.")

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


def _head_dim(fields: Fields, field: str) -> int:
    size = fields.count(field, 128)
    if size > _MAX_DELTA_DIM:
        raise fields.bad(field, f"must be at most {_MAX_DELTA_DIM}")
    return size
