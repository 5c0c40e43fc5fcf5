"""A checkpoint: named tensors under Hugging Face names, and the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from trioengine.hub.model_config import ModelConfig
from trioengine.worker.quantization.four_bit import FourBitWeight


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    nbytes: int  # in the file


class Checkpoint(Protocol):
    """Tensors are read one at a time, so that loading needs little more memory than the model."""

    path: Path

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorShape]:
        """What there is, by name."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`, on the CPU; never a view of the file."""
        ...

    def read_four_bit(self, name: str) -> FourBitWeight | None:
        """The tensor as it is stored, where that is in four bits; else None."""
        ...

    def close(self) -> None:
        """Unmap the files."""
        ...
