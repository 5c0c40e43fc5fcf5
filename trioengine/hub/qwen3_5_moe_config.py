"""The shape of a Qwen3.5 with experts: routed ones and a shared one in all layers, else as the dense ones."""

from __future__ import annotations

from dataclasses import dataclass

from trioengine.hub.experts_config import ExpertsShape, experts_from_hf
from trioengine.hub.llama_config import count_layers
from trioengine.hub.model_config import Fields, JoinedTensors, Shape
from trioengine.hub.qwen3_5_config import DEFAULTS, Qwen35Config, decoder_fields, hybrid_values

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
MOE_DEFAULTS = {  # transformers'
    **DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_DEFAULTS = {**MOE_DEFAULTS, "num_local_experts": 256, "num_experts_per_tok": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    """The shape of a Qwen3.5 with experts."""

    experts: ExpertsShape

    def tensors_of(self, index: int) -> dict[str, Shape]:
        return self.experts.replace_mlp(Qwen35Config.tensors_of(self, index), index, self.hidden_size)

    def joined_tensors(self) -> JoinedTensors:
        for index in range(self.num_layers):
            layer = f"{self.prefix}layers.{index}."
            for name, parts in self.joined_of_layer():
                yield f"{layer}{name}", {f"{layer}{part}": rows for part, rows in parts.items()}

    def joined_of_layer(self) -> JoinedTensors:
        """Yield a layer's joined tensors, by their names behind the layer's."""
        return self.experts.stacks(self.hidden_size)


def config_from_hf(fields: Fields, num_tensors: int) -> Qwen35MoeConfig:
    """Read config.json, or its `text_config`, if it has a vision tower. Raises ModelError, naming the field."""
    text = decoder_fields(fields).defaulting(_DEFAULTS)
    size = text.count("moe_intermediate_size")
    layers = (True,) * count_layers(text, "num_hidden_layers", num_tensors)
    return Qwen35MoeConfig.from_hf(
        text.defaulting({"intermediate_size": size}),  # of an MLP, which no layer has
        num_tensors,
        model_type=fields.string("model_type"),
        experts=experts_from_hf(
            text, size, layers, normalizes=True, shared_size=text.count("shared_expert_intermediate_size")
        ),
        **hybrid_values(text, num_tensors),
    )
