"""The shape of a dense ERNIE 4.5 model: a Llama whose files have each head's rotary pairs side by side.

The model's tensors have the halves of a head one behind the other, as a Llama's. Biases, which no published model has,
are refused: joined tensors are matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.hub.llama_config import LlamaConfig
from trioengine.hub.llama_config import hf_name as hf_name
from trioengine.hub.llama_config import stored_rows as rows_of_halves
from trioengine.hub.model_config import Fields, JoinedTensor, Shape

MODEL_TYPES = ("ernie4_5",)
_ABSENT = {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True}  # null means as in a Llama
_BIASES = {"attention_bias": False, "output_bias": False, "mlp_bias": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ernie45Config(LlamaConfig):
    """The shape of a dense ERNIE 4.5 model."""

    def joined_tensors(self) -> Iterator[JoinedTensor]:
        """Yield the matrices of queries and keys, whose rows have another order in directories and GGUF files."""
        for name, shape in self.wanted_tensors().items():
            if rows := rows_of_halves(name, self):
                yield JoinedTensor(name, shape, {name: rows})


def config_from_hf(fields: Fields, num_tensors: int) -> Ernie45Config:
    """Read config.json. Raises ModelError, naming the field."""
    if fields.flag("use_bias"):
        raise ModelError(f"{fields.path}: use_bias is not supported")
    absent = {name: default for name, default in _ABSENT.items() if not fields.has(name)}
    given = fields.defaulting({"rms_norm_eps": 1e-5, "rope_theta": 500000.0, **absent})
    return Ernie45Config.from_hf(given, num_tensors, **_BIASES)


def config_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> Ernie45Config:
    """Read the `ernie4_5.*` metadata. Raises ModelError, naming the key or the tensor."""
    return Ernie45Config.from_gguf(metadata, shapes, path, "ernie4_5", **_BIASES)
