"""A checkpoint: named tensors under Hugging Face names, and the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from trioengine.core.errors import ModelError
from trioengine.worker.models.llama_config import LlamaConfig
from trioengine.worker.quantization.four_bit import FourBitWeight

_SHOWN = 5  # names in an error message


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What a header says of one tensor."""

    shape: tuple[int, ...]
    nbytes: int  # in the file


class Checkpoint(Protocol):
    """Tensors are read one at a time, so that loading needs little more memory than the model."""

    path: Path
    config: LlamaConfig

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


def check_tensors(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ModelError unless the checkpoint holds exactly the wanted tensors, and perhaps optional ones."""
    found = checkpoint.tensors
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"{checkpoint.path}: missing tensors: {_list(missing)}")
    unexpected = [name for name in found if name not in wanted and name not in optional]
    if unexpected:
        raise ModelError(f"{checkpoint.path}: unexpected tensors: {_list(unexpected)}")
    for name, info in found.items():
        shape = wanted[name] if name in wanted else optional[name]
        if info.shape != shape:
            raise ModelError(f"{checkpoint.path}: tensor {name} has the shape {list(info.shape)}, not {list(shape)}")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
