"""The shape of a Qwen3-Next: Qwen3.5's with experts, in all layers or some.

Its directories have the projections of a delta net in two tensors, in which all rows of a head of keys and of the heads
of values that share it lie together. GGUF files have one or both of these. Experts are stored as Qwen3.5's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.hub.experts_config import experts_from_hf, layers_with_experts
from trioengine.hub.llama_config import count_layers, gguf_fields
from trioengine.hub.model_config import Fields, JoinedTensor, Rows, Shape
from trioengine.hub.qwen3_5_config import hybrid_hf_name, hybrid_values
from trioengine.hub.qwen3_5_config import stored_form as stored_form
from trioengine.hub.qwen3_5_moe_config import GGUF_NAMES, MOE_DEFAULTS, Qwen35MoeConfig, hybrid_moe_gguf_values

MODEL_TYPES = ("qwen3_next",)
GGUF_TYPES = ("qwen3next",)
_GGUF_NAMES = {**GGUF_NAMES, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
_DEFAULTS = {**MOE_DEFAULTS, "num_local_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5632}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """The shape of a Qwen3-Next."""

    def joined_of_layer(self) -> Iterator[JoinedTensor]:
        yield from self.experts.stacks(self.hidden_size)
        heads, size = self.delta.num_key_heads, self.delta.key_dim
        shared = self.delta.num_value_heads // heads
        q, k, v, z = _interleaved(heads, size, size, shared * self.delta.value_dim, shared * self.delta.value_dim)
        b, a = _interleaved(heads, shared, shared)
        for name, parts in {"qkvz": {"qkv": q + k + v, "z": z}, "ba": {"b": b, "a": a}}.items():
            shape = (sum(len(piece) for rows in parts.values() for piece in rows), self.hidden_size)
            yield JoinedTensor(_projection(name), shape, {_projection(part): rows for part, rows in parts.items()})


def _projection(name: str) -> str:
    return f"linear_attn.in_proj_{name}.weight"


def _interleaved(groups: int, *sizes: int) -> Iterator[Rows]:
    """Yield the rows of each kind, of which each group has `sizes`, one kind behind the other."""
    start, step = 0, sum(sizes)
    for size in sizes:
        yield tuple(range(first, first + size) for first in range(start, start + groups * step, step))
        start += size


def config_from_hf(fields: Fields, num_tensors: int) -> Qwen3NextConfig:
    """Read config.json. Raises ModelError, naming the field."""
    given = fields.defaulting(_DEFAULTS)
    layers = layers_with_experts(given, count_layers(given, "num_hidden_layers", num_tensors))
    return Qwen3NextConfig.from_hf(
        given,
        num_tensors,
        experts=experts_from_hf(
            given,
            given.count("moe_intermediate_size"),
            layers,
            normalizes=given.flag("norm_topk_prob", default=True),
            shared_size=given.count("shared_expert_intermediate_size"),
        ),
        **hybrid_values(given, num_tensors),
    )


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Qwen3NextConfig:
    """Read the `qwen3next.*` metadata. Raises ModelError, naming the key or the tensor."""
    fields = gguf_fields(metadata, path, "qwen3next")
    values = hybrid_moe_gguf_values(fields, shapes)
    return Qwen3NextConfig.from_gguf(metadata, shapes, path, "qwen3next", model_type="qwen3_next", **values)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    return hybrid_hf_name(name, _GGUF_NAMES)
