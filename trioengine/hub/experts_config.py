"""The shape of layers with experts: a router chooses the MLPs of each token (arXiv 1701.06538, 2101.03961).

Each expert has tensors of its own, as in most directories. A GGUF file, and Qwen3.5's directories, have one tensor for
all experts of a layer: a stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trioengine.hub.llama_config import LAYER_NAMES, LlamaConfig
from trioengine.hub.model_config import MAX_MODEL_TENSORS, STACKED, Fields, JoinedTensor, Rows, Shape

GGUF_NAMES = {  # of a layer with experts
    **{name: hf_name for name, hf_name in LAYER_NAMES.items() if not hf_name.startswith("mlp.")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{STACKED}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{STACKED}.up_proj",
    "ffn_down_exps": f"mlp.experts.{STACKED}.down_proj",
}
GGUF_SHARED_NAMES = {  # of a shared expert
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The experts of a decoder."""

    count: int  # of a layer
    num_chosen: int  # for a token
    size: int  # of one expert, between its projections
    normalizes: bool  # whether the chosen experts' probabilities are divided by their sum
    layers: tuple[bool, ...]  # whether each layer has experts; the others have one MLP
    shared_size: int = 0  # of the shared expert, which every token is given to as well; 0 without one

    def replace_mlps(self, tensors: dict[str, Shape], prefix: str, hidden: int) -> None:
        """Put experts in place of MLPs into all tensors, whose names begin with the prefix."""
        for index, has_experts in enumerate(self.layers):
            if has_experts:
                mlp = f"{prefix}layers.{index}.mlp."
                for name in _PROJECTIONS:
                    del tensors[f"{mlp}{name}.weight"]
                tensors |= self._tensors(mlp, hidden)

    def _tensors(self, mlp: str, hidden: int) -> dict[str, Shape]:
        tensors: dict[str, Shape] = {f"{mlp}gate.weight": (self.count, hidden)}
        for name in _PROJECTIONS:
            shape = _shape(name, self.size, hidden)
            tensors |= {f"{mlp}experts.{expert}.{name}.weight": shape for expert in range(self.count)}
            if self.shared_size:
                tensors[f"{mlp}shared_expert.{name}.weight"] = _shape(name, self.shared_size, hidden)
        if self.shared_size:
            tensors[f"{mlp}shared_expert_gate.weight"] = (1, hidden)
        return tensors

    def stacks(self, hidden: int) -> Iterator[JoinedTensor]:
        """Yield the stacks of a layer, by their names behind the layer's."""
        for stack, names in _STACKS.items():
            size, columns = _shape(names[0], self.size, hidden)
            rows: dict[str, Rows] = {}
            for expert in range(self.count):
                for place, name in enumerate(names, expert * len(names)):
                    rows[f"mlp.experts.{expert}.{name}.weight"] = (range(place * size, (place + 1) * size),)
            yield JoinedTensor(f"mlp.experts.{stack}", (self.count, len(names) * size, columns), rows)


def _shape(projection: str, size: int, hidden: int) -> Shape:
    return (hidden, size) if projection == "down_proj" else (size, hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig(LlamaConfig):
    """The shape of a decoder with experts in some layers, or in all."""

    experts: ExpertsShape

    @property
    def has_experts(self) -> bool:
        return any(self.experts.layers)

    def wanted_tensors(self, prefix: str = "model.") -> dict[str, Shape]:
        wanted = LlamaConfig.wanted_tensors(self, prefix)
        self.experts.replace_mlps(wanted, prefix, self.hidden_size)
        return wanted


def experts_from_hf(
    fields: Fields, size: int, layers: Sequence[bool], *, normalizes: bool, shared_size: int = 0
) -> ExpertsShape:
    """Read the fields of config.json; `size` is of one expert. Raises ModelError, naming the field."""
    count = "num_experts" if fields.has("num_experts") else "num_local_experts"  # transformers 5 writes the latter
    counts = _counts(fields, count, "num_experts_per_tok", sum(layers))
    return ExpertsShape(
        count=counts[0],
        num_chosen=counts[1],
        size=size,
        normalizes=normalizes,
        layers=tuple(layers),
        shared_size=shared_size,
    )


def experts_from_gguf(
    fields: Fields, size: int, num_layers: int, *, normalizes: bool, shared_size: int = 0
) -> ExpertsShape:
    """Read the metadata: all layers have experts. llama.cpp fixes `normalizes` for each architecture.

    Raises ModelError, naming the key.
    """
    count, num_chosen = _counts(fields, "expert_count", "expert_used_count", num_layers)
    return ExpertsShape(
        count=count,
        num_chosen=num_chosen,
        size=size,
        normalizes=normalizes,
        layers=(True,) * num_layers,
        shared_size=shared_size,
    )


def _counts(fields: Fields, count: str, per_token: str, num_layers: int) -> tuple[int, int]:
    """Return the counts. Raises ModelError if there are too few experts for a token, or too many for a model."""
    num_experts, chosen = fields.count(count), fields.count(per_token)
    if chosen > num_experts:
        raise fields.bad(per_token, f"must be at most the number of experts, {num_experts}")
    if len(_PROJECTIONS) * num_experts * num_layers > MAX_MODEL_TENSORS:
        most = MAX_MODEL_TENSORS // (len(_PROJECTIONS) * num_layers)
        raise fields.bad(count, f"must be at most {most} in {num_layers} layers")
    return num_experts, chosen


def layers_with_experts(fields: Fields, num_layers: int) -> list[bool]:
    """Return for each layer whether it has experts: every `decoder_sparse_step`th, but for `mlp_only_layers`."""
    step, dense = fields.count("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise fields.bad("mlp_only_layers", "must be a list of layers")
    without = set(dense)
    return [(index + 1) % step == 0 and index not in without for index in range(num_layers)]
