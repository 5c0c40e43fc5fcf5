"""The shape of layers with experts: a router chooses the MLPs of each token (arXiv 1701.06538, 2101.03961).

Each expert has tensors of its own, as in safetensors. A GGUF file has one tensor for all experts of a layer: a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig
from trioengine.hub.model_config import MAX_MODEL_TENSORS, STACKED, Fields, Shape

GGUF_NAMES = {  # of a layer with experts
    **{name: hf_name for name, hf_name in LAYER_NAMES.items() if not hf_name.startswith("mlp.")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{STACKED}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{STACKED}.up_proj",
    "ffn_down_exps": f"mlp.experts.{STACKED}.down_proj",
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(LlamaConfig):
    """The shape of a decoder with experts in some layers, or in all."""

    num_experts: int  # of a layer
    num_experts_per_tok: int  # that a token is given to
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the chosen experts' probabilities are divided by their sum
    has_experts: tuple[bool, ...]  # of each layer; the others have one MLP

    def wanted_tensors(self, prefix: str = "model.") -> dict[str, Shape]:
        wanted = LlamaConfig.wanted_tensors(self, prefix)
        for index, has_experts in enumerate(self.has_experts):
            if has_experts:
                mlp = f"{prefix}layers.{index}.mlp."
                for name in _PROJECTIONS:
                    del wanted[f"{mlp}{name}.weight"]
                wanted |= self._expert_tensors(mlp)
        return wanted

    def _expert_tensors(self, mlp: str) -> dict[str, Shape]:
        hidden, inner = self.hidden_size, self.moe_intermediate_size
        tensors: dict[str, Shape] = {f"{mlp}gate.weight": (self.num_experts, hidden)}
        for name in _PROJECTIONS:
            shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
            tensors |= {f"{mlp}experts.{expert}.{name}.weight": shape for expert in range(self.num_experts)}
        return tensors


def experts_from_hf(fields: Fields, size: int, has_experts: Sequence[bool]) -> dict[str, Any]:
    """Read the fields of config.json, with transformers' defaults for absent ones; `size` is of one expert.

    Raises ModelError, naming the field.
    """
    count = "num_experts" if fields.has("num_experts") else "num_local_experts"  # transformers 5 writes the latter
    return _checked(fields, count, "num_experts_per_tok", has_experts) | {
        "moe_intermediate_size": size,
        "norm_topk_prob": fields.flag("norm_topk_prob"),
    }


def experts_from_gguf(fields: Fields, size: int, num_layers: int, *, norm_topk_prob: bool) -> dict[str, Any]:
    """Read the metadata: all layers have experts. llama.cpp fixes `norm_topk_prob` for each architecture.

    Raises ModelError, naming the key.
    """
    return _checked(fields, "expert_count", "expert_used_count", (True,) * num_layers) | {
        "moe_intermediate_size": size,
        "norm_topk_prob": norm_topk_prob,
    }


def _checked(fields: Fields, count: str, per_token: str, has_experts: Sequence[bool]) -> dict[str, Any]:
    """Return the counts. Raises ModelError if there are too few experts for a token, or too many for a model."""
    num_experts, chosen = fields.count(count), fields.count(per_token)
    if chosen > num_experts:
        raise fields.bad(per_token, f"must be at most the number of experts, {num_experts}")
    if len(_PROJECTIONS) * num_experts * sum(has_experts) > MAX_MODEL_TENSORS:
        most = MAX_MODEL_TENSORS // (len(_PROJECTIONS) * sum(has_experts))
        raise fields.bad(count, f"must be at most {most} in {sum(has_experts)} layers")
    return {"num_experts": num_experts, "num_experts_per_tok": chosen, "has_experts": tuple(has_experts)}
