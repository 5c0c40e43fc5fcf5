"""A checkpoint, named tensors and a configuration, and the WeightReader by which a model takes its weights from it."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trioengine.core.errors import ModelError
from trioengine.hub.model_config import ModelConfig
from trioengine.worker.kernels.integer_weights import IntegerWeight, can_multiply, join_integers, to_integers
from trioengine.worker.kernels.linear import Linear, joined, make_linear
from trioengine.worker.kernels.products import Products
from trioengine.worker.scheduling.runner_interface import OnProgress


@dataclass(frozen=True, slots=True)
class TensorShape:
    """The header's entry of one tensor."""

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
        """The tensors by name."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`, on the CPU; never a view of the file."""
        ...

    @property
    def integer_share(self) -> float:
        """The share of the matrices that `read_integers` gives."""
        ...

    def read_integers(self, name: str) -> IntegerWeight | None:
        """The tensor as it is stored, where integer products take that; else None."""
        ...

    def close(self) -> None:
        """Unmap the files."""
        ...


def stored_sizes(checkpoint: Checkpoint, wanted: Collection[str]) -> dict[str, int]:
    """Return the bytes of the wanted tensors that the checkpoint has, by name."""
    return {name: info.nbytes for name, info in checkpoint.tensors.items() if name in wanted}


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """How linear layers are made, on the CPU."""

    products: Products | None = None  # None: torch's
    takes_integers: bool = False  # of `products`, where weights are stored so
    quantizes: bool = False  # weights that are stored otherwise, to integers
    out_dtype: torch.dtype | None = None  # of results; None: the model's dtype

    def exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A layer of numbers of the dtype."""
        make = make_linear if self.products is None else self.products.make
        return make(weight, bias, self.out_dtype)

    def of_integers(self, weight: IntegerWeight | None, bias: Tensor | None = None) -> Linear | None:
        """A layer of integers that are stored; None where products do not take them."""
        if self.products is None or weight is None or not can_multiply(weight.codes.shape) or not weight.is_finite:
            return None
        return self.products.make_integer(weight, bias, self.out_dtype)

    def make(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A layer of numbers, or of the integers that they are quantized to."""
        integers = to_integers(weight) if self.quantizes and can_multiply(weight.shape) else None
        return self.of_integers(integers, bias) or self.exact(weight, bias)


class Projection(NamedTuple):
    """One of the matrices whose outputs a linear layer has, one behind the other."""

    name: str  # of its tensor, but for `.weight`
    outputs: int


class WeightReader:
    """Reads tensors and makes layers of them: files, dtypes and quantization stay outside of the models."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        wanted: Collection[str],
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        linears: LinearOptions | None = None,
    ) -> None:
        """`wanted` are the tensors that the progress counts.

        Raises ModelError if the tensors exceed the machine's memory.
        """
        self._checkpoint = checkpoint
        self._dtype, self._device = dtype, device
        self._sizes = stored_sizes(checkpoint, wanted)
        self._total, self._done = sum(self._sizes.values()), 0
        self._check_memory()
        self._on_progress = on_progress
        self._linears = linears or LinearOptions()
        self._given: list[weakref.ref[Tensor]] = []  # weakly: a layer may pack a tensor, and drop it
        self.projections: dict[Linear, tuple[Projection, ...]] = {}  # of the layers that were made
        on_progress(0, self._total)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return name in self._checkpoint.tensors

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in `dtype` or the model's, on its device."""
        return self._give(self._read(name, dtype))

    def linear(self, *names: str) -> Linear:
        """One layer of all the named projections, which share their input: `NAME.weight`, and `NAME.bias` if present.

        The header's check leaves no doubt: a checkpoint has the biases of its configuration, and no others.
        """
        linear = self._linear(self._linears, *names)
        self.projections[linear] = tuple(
            Projection(name, self._checkpoint.tensors[f"{name}.weight"].shape[0]) for name in names
        )
        return linear

    def head(self, name: str, weight: Tensor | None = None) -> Linear:
        """The layer from hidden states to logits, which are float32: in bfloat16 many of the best would be equal.

        `weight`: the tensor `NAME.weight`, where `tensor` has returned it for an embedding that is the head too.
        """
        options = replace(self._linears, out_dtype=torch.float32)
        if weight is None:
            return self._linear(options, name)
        return self._stored_linear(options, (name,), None) or options.make(weight)

    def exact_linear(self, *names: str) -> Linear:
        """A layer of numbers of the dtype, also where others are of integers."""
        return self._linears.exact(self._give(joined([self._read(f"{name}.weight") for name in names])))

    def _linear(self, options: LinearOptions, *names: str) -> Linear:
        bias = (
            self._give(joined([self._read(f"{name}.bias") for name in names])) if self.has(f"{names[0]}.bias") else None
        )
        linear = self._stored_linear(options, names, bias)
        if linear is None:
            return options.make(self._give(joined([self._read(f"{name}.weight") for name in names])), bias)
        for name in names:
            self._count(f"{name}.weight")
        return linear

    def _stored_linear(self, options: LinearOptions, names: tuple[str, ...], bias: Tensor | None) -> Linear | None:
        if options.products is None or not options.takes_integers:
            return None
        return options.of_integers(
            join_integers(self._checkpoint.read_integers(f"{name}.weight") for name in names), bias
        )

    def in_use(self) -> list[Tensor]:
        """The tensors given out that are still referenced."""
        return [tensor for tensor in (given() for given in self._given) if tensor is not None]

    def _check_memory(self) -> None:
        """A file with holes may claim tensors of any size; a GPU's memory runs out without harm to others."""
        shapes = (self._checkpoint.tensors[name].shape for name in self._sizes)
        needed = sum(map(math.prod, shapes)) * self._dtype.itemsize
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self._device.type == "cpu" and needed > present:
            path = self._checkpoint.path
            raise ModelError(f"{path}: the weights take {needed} bytes of memory, and the machine has {present}")

    def _read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._checkpoint.read(name, dtype or self._dtype).to(self._device)
        self._count(name)
        return tensor

    def _count(self, name: str) -> None:
        if name in self._sizes:
            self._done += self._sizes[name]
            self._on_progress(self._done, self._total)

    def _give(self, tensor: Tensor) -> Tensor:
        self._given.append(weakref.ref(tensor))
        return tensor
