"""Embeddings: vectors of float32, of the length 1."""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from trioengine.core.checks import integer, rejected
from trioengine.core.types import Usage
from trioengine.core.wording import counted

if TYPE_CHECKING:
    Vector: TypeAlias = array[float]  # typecode "f": 4 bytes a number
else:
    Vector = array  # not subscriptable before Python 3.12

MAX_INPUTS = 2048  # of a call, as OpenAI has it


@dataclass(frozen=True, slots=True, repr=False)
class Embeddings:
    """The embedding of each input, in their order: its vector has the length 1; `usage` is of all inputs together."""

    vectors: tuple[Vector, ...]
    usage: Usage

    def __repr__(self) -> str:
        size = len(self.vectors[0]) if self.vectors else 0
        return f"<Embeddings {counted(len(self.vectors), 'vector')} of {counted(size, 'number')}>"


def vector_of(data: bytes, dimensions: int | None = None) -> Vector:
    """Return the vector in little-endian float32; of its first `dimensions` numbers, divided by their length."""
    vector = array("f", struct.unpack(f"<{len(data) // 4}f", data))
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return array("f", [number / length for number in kept])


def bytes_of(vector: Vector) -> bytes:
    """Return the vector in little-endian float32."""
    return struct.pack(f"<{len(vector)}f", *vector)


def check_dimensions(dimensions: object, size: int) -> int | None:
    """Return the number of dimensions. Raises RequestRejected unless it is None or from 1 to the model's `size`."""
    if dimensions is None:
        return None
    try:
        return integer(dimensions, 1, size)
    except ValueError as exc:
        raise rejected("dimensions", str(exc)) from None
