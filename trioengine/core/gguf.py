"""The header of a GGUF file: metadata, and where the tensors lie. Only the header: weights are the worker's.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every length and
offset is checked against the buffer before it is used, so a truncated or lying file is refused before any memory is
spent on it.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from trioengine.core.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME = 1 << 16  # bytes of a key or a tensor's name

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorType(enum.Enum):
    """How a tensor's numbers are stored: (number of the type, elements in a block, bytes of a block)."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    BF16 = (30, 1, 2)

    def __init__(self, number: int, block_elements: int, block_bytes: int) -> None:
        self.number = number
        self.block_elements = block_elements
        self.block_bytes = block_bytes


_TENSOR_TYPES = {tensor_type.number: tensor_type for tensor_type in TensorType}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` in torch's order (rows first), `offset` and `nbytes` in bytes, from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata, by key (arrays are lists), and the tensors, in the order of the file."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def parse_gguf(
    buffer: bytes | bytearray | memoryview, name: str = "the GGUF file", *, skip: Container[str] = ()
) -> GGUFHeader:
    """Read the header of the whole file in `buffer` (an mmap will do).

    Keys in `skip` are passed over, not decoded. Raises ModelError, beginning with `name`, for whatever is not a GGUF
    file that is all there.
    """
    with memoryview(buffer) as view:
        try:
            return _Reader(view.cast("B") if view.format != "B" else view).header(skip)
        except _Bad as exc:
            raise ModelError(f"{name}: {exc}") from None


class _Bad(Exception):
    """What is wrong with the file."""


class _Reader:
    """A position in the buffer; each method reads one thing, and checks first that it is there."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._size = len(view)
        self._at = 0

    def header(self, skip: Container[str]) -> GGUFHeader:
        if bytes(self._take(4, "the magic")) != MAGIC:
            raise _Bad("not a GGUF file")
        version = self._u32("the version")
        if version not in VERSIONS:
            raise _Bad(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))} are")
        tensor_count = self._count("tensors", 24)
        metadata = self._metadata(self._count("metadata entries", 13), skip)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _Bad(f"general.alignment must be a power of two, got {alignment!r}")
        infos = [self._tensor_info() for _ in range(tensor_count)]
        start = (self._at + alignment - 1) // alignment * alignment
        tensors: dict[str, GGUFTensor] = {}
        for tensor_name, shape, tensor_type, offset in infos:
            if tensor_name in tensors:
                raise _Bad(f"tensor {tensor_name} is there twice")
            tensors[tensor_name] = self._place(tensor_name, shape, tensor_type, offset, start, alignment)
        _check_overlaps(tensors.values())
        return GGUFHeader(metadata, tuple(tensors.values()))

    def _metadata(self, count: int, skip: Container[str]) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        keys: set[str] = set()
        for _ in range(count):
            key = self._string("a metadata key", MAX_NAME)
            if key in keys:
                raise _Bad(f"metadata key {key} is there twice")
            keys.add(key)
            kind = self._u32(f"the type of {key}")
            if key in skip:
                self._value(kind, key, decode=False)
            else:
                metadata[key] = self._value(kind, key, decode=True)
        return metadata

    def _value(self, kind: int, key: str, *, decode: bool) -> Any:
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1, key)[0]
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise _Bad(f"{key} has the unknown type {kind}")
        element = self._u32(f"the element type of {key}")
        if element in _SCALARS:
            count = self._count(f"elements of {key}", struct.calcsize("<" + _SCALARS[element]))
            if not decode:
                self._take(count * struct.calcsize("<" + _SCALARS[element]), key)
                return None
            return list(self._scalars(_SCALARS[element], count, key))
        if element == _STRING:
            return self._strings(self._count(f"elements of {key}", 8), key, decode=decode)
        raise _Bad(f"{key} is an array of the type {element}, which is not supported")

    def _strings(self, count: int, key: str, *, decode: bool) -> list[str]:
        """The hot loop: a vocabulary and its merges are 100,000 strings."""
        view, at, size, unpack = self._view, self._at, self._size, _U64.unpack_from
        strings = []
        for _ in range(count):
            if size - at < 8:
                raise _Bad(f"the file ends in {key}")
            (length,) = unpack(view, at)
            at += 8
            if length > size - at:
                raise _Bad(f"the file ends in {key}")
            if decode:
                strings.append(_decode(view[at : at + length], key))
            at += length
        self._at = at
        return strings

    def _tensor_info(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string("a tensor's name", MAX_NAME)
        dimensions = self._u32(f"the dimensions of {name}")
        if dimensions > MAX_DIMENSIONS:
            raise _Bad(f"tensor {name} has {dimensions} dimensions, {MAX_DIMENSIONS} are the most")
        shape = tuple(reversed(self._scalars("Q", dimensions, name)))
        number = self._u32(f"the type of tensor {name}")
        if number not in _TENSOR_TYPES:
            known = ", ".join(tensor_type.name for tensor_type in TensorType)
            raise _Bad(f"tensor {name} has type {number}, which is not supported; supported: {known}")
        return name, shape, _TENSOR_TYPES[number], self._u64(f"the offset of {name}")

    def _place(
        self, name: str, shape: tuple[int, ...], kind: TensorType, offset: int, start: int, alignment: int
    ) -> GGUFTensor:
        elements = math.prod(shape)
        row = shape[-1] if shape else 1
        if elements == 0 or row % kind.block_elements:
            raise _Bad(f"tensor {name} has the shape {list(shape)}, which {kind.name} cannot store")
        nbytes = elements // kind.block_elements * kind.block_bytes
        if offset % alignment:
            raise _Bad(f"tensor {name} is not aligned to {alignment} bytes")
        if start + offset + nbytes > self._size:
            missing = start + offset + nbytes - self._size
            raise _Bad(f"the file is truncated: tensor {name} ends {missing} bytes beyond its end")
        return GGUFTensor(name, shape, kind, start + offset, nbytes)

    def _scalars(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._u64(what)
        if limit is not None and length > limit:
            raise _Bad(f"{what} is {length} bytes long, {limit} are the most")
        return _decode(self._take(length, what), what)

    def _count(self, what: str, least: int) -> int:
        """A count of things that take at least `least` bytes each: no more than the rest of the file can hold."""
        count = self._u64(f"the number of {what}")
        if count > (self._size - self._at) // least:
            raise _Bad(f"the file claims {count} {what}, more than it can hold: it is truncated or damaged")
        return count

    def _u32(self, what: str) -> int:
        return int(_U32.unpack(self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack(self._take(8, what))[0])

    def _take(self, count: int, what: str) -> memoryview:
        if count > self._size - self._at:
            raise _Bad(f"the file ends in {what}")
        self._at += count
        return self._view[self._at - count : self._at]


def _check_overlaps(tensors: Iterable[GGUFTensor]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise _Bad(f"tensors {last} and {tensor.name} overlap")
        end, last = tensor.offset + tensor.nbytes, tensor.name


def _decode(data: memoryview, what: str) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise _Bad(f"{what} is not UTF-8") from None
