"""Models, a file for each architecture, and the protocols between them and the rest of the worker.

An architecture is one file of this folder, named after the `model_type` of config.json (the `general.architecture` of a
GGUF file), which defines `Model`, a ModelFactory. Its configuration is a module of `trioengine.hub`. The runner, the KV
cache, the kernels and the weights use these protocols, and `ModelConfig` and `TextConfig` of the configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from trioengine.hub.model_config import ModelConfig
from trioengine.worker.kernels import Attention, Computed, Kernels
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.weights.checkpoint import WeightReader


class Model(Protocol):
    """A decoder with its weights."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Tensor:
        """Compute the batch, and store its keys, values and states: hidden states of its `output_rows`, for `logits`.

        `states`: of a model that has states.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [num_rows, vocab_size], in float32, of hidden states [num_rows, hidden_size]."""
        ...

    def compute(self, batch: ForwardBatch, attention: Attention, states: StateCache | None = None) -> Computed:
        """Compute the batch, the logits of its `output_rows`, and their best tokens."""
        ...


@runtime_checkable
class VisionModel(Model, Protocol):
    """A decoder that also takes embeddings of images."""

    def encode(self, tiles: Tensor) -> Tensor:
        """The embeddings [num_tiles, tokens_per_tile, hidden_size] of uint8 tiles [num_tiles, 3, size, size]."""
        ...


class ModelFactory(Protocol):
    """Makes the model of a checkpoint; `config` is of the architecture's own class."""

    def __call__(self, config: Any, weights: WeightReader, kernels: Kernels, max_model_len: int) -> Model:
        """Read the weights, one layer at a time; positions are less than `max_model_len`."""
        ...


def load_model(config: ModelConfig, weights: WeightReader, kernels: Kernels, max_model_len: int) -> Model:
    """Load the model of `models/<model_type>.py`: the headers' reader has refused any other type."""
    module = import_module(f"trioengine.worker.models.{config.model_type}")
    return cast("ModelFactory", module.Model)(config, weights, kernels, max_model_len)
