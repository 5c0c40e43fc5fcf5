"""The shape of a Qwen3-Next: Qwen3.5's with experts, in all layers or some.

Its directories have the projections of a delta net in two tensors, in which all rows of a head of keys, and of the heads
of values that share it, lie together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trioengine.hub.experts_config import experts_from_hf, layers_with_experts
from trioengine.hub.llama_config import count_layers
from trioengine.hub.model_config import Fields, JoinedTensors, Rows
from trioengine.hub.qwen3_5_config import hybrid_values
from trioengine.hub.qwen3_5_moe_config import MOE_DEFAULTS, Qwen35MoeConfig

MODEL_TYPES = ("qwen3_next",)
_DEFAULTS = {**MOE_DEFAULTS, "num_local_experts": 512, "num_experts_per_tok": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """The shape of a Qwen3-Next."""

    def joined_of_layer(self) -> JoinedTensors:
        delta = self.delta
        shared = delta.num_value_heads // delta.num_key_heads
        values = shared * delta.value_dim
        queries, keys, value_rows, gates = _interleaved(delta.num_key_heads, delta.key_dim, delta.key_dim, values, values)
        yield (
            "linear_attn.in_proj_qkvz.weight",
            {
                "linear_attn.in_proj_qkv.weight": queries + keys + value_rows,
                "linear_attn.in_proj_z.weight": gates,
            },
        )
        strengths, times = _interleaved(delta.num_key_heads, shared, shared)
        yield (
            "linear_attn.in_proj_ba.weight",
            {"linear_attn.in_proj_b.weight": strengths, "linear_attn.in_proj_a.weight": times},
        )


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
        given.defaulting({"intermediate_size": 5632}),
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
