"""The interface of a model, and how one is made: nothing else in the worker names an architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from trioengine.hub.model_config import ModelConfig
from trioengine.worker.kernels.batch import ForwardBatch
from trioengine.worker.kernels.interface import Attention, Kernels
from trioengine.worker.models.idefics3 import Idefics3Model
from trioengine.worker.models.llama import LlamaModel
from trioengine.worker.weights.checkpoint import WeightReader


class Model(Protocol):
    """A decoder with its weights."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        """Compute the batch and store its keys and values: logits [num_samples, vocab_size] of the sampled rows."""
        ...


@runtime_checkable
class VisionModel(Model, Protocol):
    """A decoder that takes embeddings of images, too."""

    def encode(self, tiles: Tensor) -> Tensor:
        """The embeddings [num_tiles, tokens_per_tile, hidden_size] of uint8 tiles [num_tiles, 3, size, size]."""
        ...


# By `model_type`: makes the model of its configuration, its weights, its kernels and the longest sequence.
_Build: TypeAlias = Callable[[Any, WeightReader, Kernels, int], Model]
_MODELS: dict[str, _Build] = {"llama": LlamaModel, "idefics3": Idefics3Model, "smolvlm": Idefics3Model}


def build_model(config: ModelConfig, weights: WeightReader, kernels: Kernels, max_model_len: int) -> Model:
    """Read the weights, one layer at a time."""
    return _MODELS[config.model_type](config, weights, kernels, max_model_len)
