"""The header of a GGUF file: its metadata and the places of its tensors. The worker reads the weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every length and
offset is checked against the buffer before it is used, and all that is decoded is counted against one limit, so a
truncated, lying or sparse file is refused before memory or time is spent on it.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from trioengine.core.errors import ModelError
from trioengine.core.wording import brief

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME = 1 << 16  # bytes of a key or a tensor's name
MAX_TENSORS = 1 << 14
MAX_TEXT = 1 << 20  # bytes of a string of the metadata that is decoded
MAX_DECODED = 56 << 20  # bytes of memory, by the estimates below; Llama 3's vocabulary and merges take 41 MB

_STRING_COST, _CHARACTER_COST = 64, 4  # bytes of a Python string, and of each of its characters at most
_NUMBER_COST, _ENTRY_COST, _TENSOR_COST = 16, 128, 768
_SKIPPED_COST = 16  # of a string that is not decoded: it takes no memory, but time

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorType(enum.Enum):
    """The storage format of a tensor: (number of the type, elements in a block, bytes of a block).

    All types of ggml that the gguf package has dequantized since its version 0.17.
    """

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
    IQ2_XXS = (16, 256, 66)
    IQ2_XS = (17, 256, 74)
    IQ3_XXS = (18, 256, 98)
    IQ1_S = (19, 256, 50)
    IQ4_NL = (20, 32, 18)
    IQ3_S = (21, 256, 110)
    IQ2_S = (22, 256, 82)
    IQ4_XS = (23, 256, 136)
    IQ1_M = (29, 256, 56)
    BF16 = (30, 1, 2)
    TQ1_0 = (34, 256, 54)
    TQ2_0 = (35, 256, 66)

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
class Undecoded:
    """An array or a long string of the metadata that was checked, not decoded; `length` in elements or bytes."""

    kind: str
    length: int

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<{self.kind} of length {self.length}>"


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The metadata, by key (decoded arrays are lists), and the tensors, in the order of the file."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def parse_gguf(
    buffer: bytes | bytearray | memoryview, name: str = "the GGUF file", *, arrays: Container[str] = ()
) -> GGUFHeader:
    """Read the header of the whole file in `buffer` (an mmap will do).

    Arrays are decoded for the keys in `arrays` only; other arrays, and strings longer than MAX_TEXT, are Undecoded.
    Raises ModelError, beginning with `name`, if the file is not GGUF, is truncated, or its header takes more than
    MAX_DECODED.
    """
    with memoryview(buffer) as view:
        try:
            return _Reader(view.cast("B") if view.format != "B" else view, arrays).header()
        except _Bad as exc:
            raise ModelError(f"{name}: {exc}") from None


class _Bad(Exception):
    """The file is invalid; the message is the reason."""


class _Reader:
    """A position in the buffer; each method checks that a value is there, and reads it."""

    def __init__(self, view: memoryview, arrays: Container[str]) -> None:
        self._view = view
        self._arrays = arrays
        self._size = len(view)
        self._at = 0
        self._left = MAX_DECODED

    def header(self) -> GGUFHeader:
        if bytes(self._take(4, "the magic")) != MAGIC:
            raise _Bad("not a GGUF file")
        version = self._u32("the version")
        if version not in VERSIONS:
            raise _Bad(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))} are")
        tensor_count = self._count("tensors", 24)
        if tensor_count > MAX_TENSORS:
            raise _Bad(f"the file has {tensor_count} tensors; at most {MAX_TENSORS} are supported")
        metadata = self._metadata(self._count("metadata entries", 13))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _Bad(f"general.alignment must be a power of two, got {brief(alignment)}")
        infos = self._tensor_infos(tensor_count)
        start = (self._at + alignment - 1) // alignment * alignment
        tensors = tuple(self._place(name, *info, start, alignment) for name, info in infos.items())
        _check_overlaps(tensors)
        return GGUFHeader(metadata, tensors)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            self._spend(_ENTRY_COST)
            key = self._string("a metadata key", MAX_NAME)
            if key in metadata:
                raise _Bad(f"metadata key {brief(key)} is there twice")
            metadata[key] = self._value(self._u32(f"the type of {brief(key)}"), key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1, key)[0]
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            raise _Bad(f"{brief(key)} has the unknown type {kind}")
        element = self._u32(f"the element type of {brief(key)}")
        if element in _SCALARS:
            return self._numbers(_SCALARS[element], key)
        if element == _STRING:
            return self._strings(key)
        raise _Bad(f"{brief(key)} is an array of the type {element}, which is not supported")

    def _text(self, key: str) -> str | Undecoded:
        """Read a string of the metadata."""
        length = self._u64(brief(key))
        data = self._take(length, brief(key))
        if length > MAX_TEXT:
            return Undecoded("string", length)
        self._spend(_STRING_COST + _CHARACTER_COST * length)
        return _decode(data, brief(key))

    def _numbers(self, code: str, key: str) -> list[Any] | Undecoded:
        size = struct.calcsize("<" + code)
        count = self._count(f"elements of {brief(key)}", size)
        if key not in self._arrays:
            self._take(count * size, brief(key))
            return Undecoded("array", count)
        self._spend(_NUMBER_COST * count)
        return list(self._scalars(code, count, key))

    def _strings(self, key: str) -> list[str] | Undecoded:
        """Read an array of strings; the hot loop: a vocabulary and its merges are 100,000 strings."""
        shown, is_decoded = brief(key), key in self._arrays
        count = self._count(f"elements of {shown}", 8)
        base, each = (_STRING_COST, _CHARACTER_COST) if is_decoded else (_SKIPPED_COST, 0)
        self._spend(base * count)
        view, at, size, left, unpack = self._view, self._at, self._size, self._left, _U64.unpack_from
        strings = []
        for _ in range(count):
            if size - at < 8:
                raise _Bad(f"the file ends in {shown}")
            (length,) = unpack(view, at)
            at += 8
            if length > size - at:
                raise _Bad(f"the file ends in {shown}")
            left -= each * length
            if left < 0:
                raise _too_large()
            if is_decoded:
                strings.append(_decode(view[at : at + length], shown))
            at += length
        self._at, self._left = at, left
        return strings if is_decoded else Undecoded("array", count)

    def _tensor_infos(self, count: int) -> dict[str, tuple[tuple[int, ...], TensorType, int]]:
        """Read the shape, type and offset of each tensor, by its name."""
        infos: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
        for _ in range(count):
            self._spend(_TENSOR_COST)
            name = self._string("a tensor's name", MAX_NAME)
            if name in infos:
                raise _Bad(f"tensor {brief(name)} is there twice")
            infos[name] = self._tensor_info(brief(name))
        return infos

    def _tensor_info(self, shown: str) -> tuple[tuple[int, ...], TensorType, int]:
        dimensions = self._u32(f"the dimensions of {shown}")
        if dimensions > MAX_DIMENSIONS:
            raise _Bad(f"tensor {shown} has {dimensions} dimensions; at most {MAX_DIMENSIONS} are supported")
        shape = tuple(reversed(self._scalars("Q", dimensions, shown)))
        number = self._u32(f"the type of tensor {shown}")
        if number not in _TENSOR_TYPES:
            known = ", ".join(tensor_type.name for tensor_type in TensorType)
            raise _Bad(f"tensor {shown} has type {number}, which is not supported; supported: {known}")
        return shape, _TENSOR_TYPES[number], self._u64(f"the offset of {shown}")

    def _place(
        self, name: str, shape: tuple[int, ...], kind: TensorType, offset: int, start: int, alignment: int
    ) -> GGUFTensor:
        elements = math.prod(shape)
        row = shape[-1] if shape else 1
        if elements == 0 or row % kind.block_elements:
            raise _Bad(f"tensor {brief(name)} has the shape {list(shape)}, which {kind.name} cannot store")
        nbytes = elements // kind.block_elements * kind.block_bytes
        if offset % alignment:
            raise _Bad(f"tensor {brief(name)} is not aligned to {alignment} bytes")
        if start + offset + nbytes > self._size:
            missing = start + offset + nbytes - self._size
            raise _Bad(f"the file is truncated: tensor {brief(name)} ends {missing} bytes beyond its end")
        return GGUFTensor(name, shape, kind, start + offset, nbytes)

    def _scalars(self, code: str, count: int, item: str) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self._take(struct.calcsize(layout), item))

    def _string(self, item: str, limit: int) -> str:
        """Read a key or a name."""
        length = self._u64(item)
        if length > limit:
            raise _Bad(f"{item} is {length} bytes long; at most {limit} are supported")
        self._spend(_CHARACTER_COST * length)
        return _decode(self._take(length, item), item)

    def _count(self, item: str, least: int) -> int:
        """Read a count of items of at least `least` bytes each; no more than the rest of the file can hold."""
        count = self._u64(f"the number of {item}")
        if count > (self._size - self._at) // least:
            raise _Bad(f"the file claims {count} {item}, more than it can hold: it is truncated or damaged")
        return count

    def _u32(self, item: str) -> int:
        return int(_U32.unpack(self._take(4, item))[0])

    def _u64(self, item: str) -> int:
        return int(_U64.unpack(self._take(8, item))[0])

    def _take(self, count: int, item: str) -> memoryview:
        if count > self._size - self._at:
            raise _Bad(f"the file ends in {item}")
        self._at += count
        return self._view[self._at - count : self._at]

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise _too_large()


def _too_large() -> _Bad:
    return _Bad(f"the header would take more than {MAX_DECODED >> 20} MiB of memory")


def _check_overlaps(tensors: tuple[GGUFTensor, ...]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise _Bad(f"tensors {brief(last)} and {brief(tensor.name)} overlap")
        end, last = tensor.offset + tensor.nbytes, tensor.name


def _decode(data: memoryview, item: str) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise _Bad(f"{item} is not UTF-8") from None
