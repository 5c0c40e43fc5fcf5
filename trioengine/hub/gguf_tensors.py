"""The tensors of a GGUF file by their Hugging Face names, and how llama.cpp's conversion has changed each."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.core.gguf import GGUFTensor, TensorType
from trioengine.core.wording import brief
from trioengine.hub.model_config import MAX_MODEL_TENSORS, STACKED, Rows, Shape


class StoredForm(enum.Enum):
    """The numbers that a file has in place of a tensor's."""

    SAME = enum.auto()
    PLUS_ONE = enum.auto()  # x + 1
    MINUS_EXPONENTIAL = enum.auto()  # -exp(x)


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of the model, and its place in the file: a stored tensor, one of a stack, or some rows of one."""

    stored_name: str
    shape: Shape
    type: TensorType
    offset: int  # of the stored tensor, in bytes
    nbytes: int  # of the model's
    rows: Rows | None = None  # None: all, in their order
    columns: Rows | None = None  # the same
    form: StoredForm = StoredForm.SAME


def place_tensors(
    hf_name: Callable[[str], str], tensors: tuple[GGUFTensor, ...], path: Path
) -> dict[str, PlacedTensor]:
    """Return the tensors by their Hugging Face names; a stack is the tensors that lie in it, one after the other.

    Raises ModelError for too many, for two of the same name, and for a stack of another rank than 3.
    """
    placed: dict[str, PlacedTensor] = {}
    for tensor in tensors:
        name = hf_name(tensor.name)
        whole = PlacedTensor(tensor.name, tensor.shape, tensor.type, tensor.offset, tensor.nbytes)
        for part_name, part in _unstacked(name, whole, path) if STACKED in name else [(name, whole)]:
            if part_name in placed:
                same = f"{brief(placed[part_name].stored_name)} and {brief(tensor.name)}"
                raise ModelError(f"{path}: tensors {same} are the same one")
            if len(placed) == MAX_MODEL_TENSORS:
                raise ModelError(f"{path}: the model has more than {MAX_MODEL_TENSORS} tensors")
            placed[part_name] = part
    return placed


def in_hf_shapes(tensors: Mapping[str, PlacedTensor], wanted: Mapping[str, Shape]) -> dict[str, PlacedTensor]:
    """Put dimensions of size 1 back, which llama.cpp leaves out."""
    shaped: dict[str, PlacedTensor] = {}
    for name, tensor in tensors.items():
        shape = wanted.get(name, tensor.shape)
        is_same = shape[-1:] == tensor.shape[-1:] and _large(shape) == _large(tensor.shape)
        shaped[name] = replace(tensor, shape=shape) if is_same else tensor
    return shaped


def _large(shape: Shape) -> list[int]:
    return [size for size in shape if size > 1]


def _unstacked(name: str, stack: PlacedTensor, path: Path) -> Iterator[tuple[str, PlacedTensor]]:
    """Yield the matrices of a stack [count, rows, columns]. Raises ModelError for another rank."""
    if len(stack.shape) != 3:
        raise ModelError(f"{path}: tensor {brief(stack.stored_name)} has {len(stack.shape)} dimensions, not 3")
    count, shape = stack.shape[0], stack.shape[1:]
    nbytes = stack.nbytes // count
    for index in range(count):
        offset = stack.offset + index * nbytes
        yield name.replace(STACKED, str(index)), replace(stack, shape=shape, offset=offset, nbytes=nbytes)


def num_rows(shape: Shape) -> int:
    """Return the rows that Rows number: a vector's elements, or all but the last dimension."""
    return math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
