"""The header of a safetensors file, with the checks of the reference implementation.

Format: https://github.com/huggingface/safetensors#format. Its length and every tensor's place are checked against the
size of the file, so that a truncated or inconsistent file is refused before a worker starts.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from trioengine.core.checks import MAX_INT64
from trioengine.core.errors import ModelError
from trioengine.core.wording import brief
from trioengine.hub.model_config import Rows, open_file, parse_json

MAX_HEADER = 4 << 20  # bytes, of one file; a tensor takes some 128, so that 32,000 have room
MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<Q")
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, or some rows of it, and its name there; `shape` has rows first."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    rows: Rows | None = None  # None: all


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, from its header. Raises ModelError, naming the file and the tensor."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            header, data_size = _header(file.read(_LENGTH.size), size)
            return _tensors(path, _parse(file.read(header)), data_size)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except _Invalid as exc:
        raise ModelError(f"{path}: {exc}") from None


class _Invalid(Exception):
    """The file violates the format."""


def _header(start: bytes, size: int) -> tuple[int, int]:
    """Return the bytes of the header, and of the tensors after it."""
    if len(start) < _LENGTH.size:
        raise _Invalid("not a safetensors file: it is shorter than a header's length")
    (length,) = _LENGTH.unpack(start)
    if length > MAX_HEADER:
        raise _Invalid(f"not a safetensors file: a header of {length} bytes (the limit is {MAX_HEADER})")
    if length > size - _LENGTH.size:
        raise _Invalid(f"the file is truncated: a header of {length} bytes in a file of {size}")
    return length, size - _LENGTH.size - length


def _parse(header: bytes) -> dict[str, Any]:
    try:
        tensors = parse_json(header, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as exc:
        raise _Invalid(f"not a safetensors file: the header is not JSON: {exc}") from None
    if not isinstance(tensors, dict):
        raise _Invalid("not a safetensors file: the header is not a JSON object")
    tensors.pop("__metadata__", None)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise _Invalid(f"{brief(name)} is in the header twice")
        fields[name] = value
    return fields


def _tensors(path: Path, entries: dict[str, Any], data_size: int) -> dict[str, StoredTensor]:
    """Read the entries. Raises _Invalid unless the tensors fill the data one after the other, without holes."""
    tensors: dict[str, StoredTensor] = {}
    places: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        begin, tensors[name] = _tensor(path, name, entry)
        places.append((begin, begin + tensors[name].nbytes, name))
    at = 0
    for begin, end, name in sorted(places):
        if end > data_size:
            raise _Invalid(f"the file is truncated: tensor {brief(name)} ends {end - data_size} bytes beyond its end")
        if begin != at:
            fault = "overlaps the tensor before it" if begin < at else f"leaves a hole of {begin - at} bytes before it"
            raise _Invalid(f"tensor {brief(name)} {fault}")
        at = end
    if at != data_size:
        raise _Invalid(f"{data_size - at} bytes after the last tensor belong to no tensor")
    return tensors


def _tensor(path: Path, name: str, entry: Any) -> tuple[int, StoredTensor]:
    """Return the offset of a tensor in the data, and the tensor."""
    shown = brief(name)
    if not isinstance(entry, dict):
        raise _Invalid(f"tensor {shown} is not a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _Invalid(f"tensor {shown} has the unknown dtype {brief(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _Invalid(
            f"tensor {shown} has the shape {brief(shape)}, which is not a list of at most {MAX_DIMENSIONS} sizes"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Invalid(f"tensor {shown} has the data_offsets {brief(offsets)}, which are not a beginning and an end")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise _Invalid(f"tensor {shown} has {end - begin} bytes, which is not {dtype} of the shape {brief(shape)}")
    return begin, StoredTensor(path, name, dtype, tuple(shape), end - begin)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry <= MAX_INT64 for entry in value)
