"""The header of a safetensors file, checked as the reference implementation does it.

Format: https://github.com/huggingface/safetensors#format. Its length and every tensor's place are checked against the
file, so a truncated or lying file is refused before a worker starts.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, TypeGuard

from trioengine.core.errors import ModelError

MAX_HEADER = 100_000_000  # bytes; the reference implementation's own limit
_LENGTH = struct.Struct("<Q")
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def check_safetensors(path: Path) -> None:
    """Return if the file is whole; only its header is read. Raises ModelError, naming the file and the tensor."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            header, data_size = _header(file.read(_LENGTH.size), size)
            _check_tensors(_parse(file.read(header)), data_size)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except _Bad as exc:
        raise ModelError(f"{path}: {exc!s:.200}") from None  # it may name a tensor


class _Bad(Exception):
    """What is wrong with the file."""


def _header(start: bytes, size: int) -> tuple[int, int]:
    """Bytes of the header, and of the tensors behind it."""
    if len(start) < _LENGTH.size:
        raise _Bad("not a safetensors file: it is shorter than a header's length")
    (length,) = _LENGTH.unpack(start)
    if length > MAX_HEADER:
        raise _Bad(f"not a safetensors file: a header of {length} bytes, {MAX_HEADER} are the most")
    if length > size - _LENGTH.size:
        raise _Bad(f"the file is truncated: a header of {length} bytes in a file of {size}")
    return length, size - _LENGTH.size - length


def _parse(header: bytes) -> dict[str, Any]:
    try:
        tensors = json.loads(header.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        raise _Bad("not a safetensors file: the header is not JSON") from None
    if not isinstance(tensors, dict):
        raise _Bad("not a safetensors file: the header is no JSON object")
    tensors.pop("__metadata__", None)
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Bad(f"{next(name for name in names if names.count(name) > 1)} is in the header twice")
    return fields


def _check_tensors(tensors: dict[str, Any], data_size: int) -> None:
    """The tensors must fill the data one after the other, without holes."""
    places = sorted((*_place(name, tensor), name) for name, tensor in tensors.items())
    at = 0
    for begin, end, name in places:
        if end > data_size:
            raise _Bad(f"the file is truncated: tensor {name} ends {end - data_size} bytes beyond its end")
        if begin != at:
            fault = "overlaps the tensor before it" if begin < at else f"leaves a hole of {begin - at} bytes before it"
            raise _Bad(f"tensor {name} {fault}")
        at = end
    if at != data_size:
        raise _Bad(f"{data_size - at} bytes after the last tensor belong to none")


def _place(name: str, tensor: Any) -> tuple[int, int]:
    """Where a tensor begins and ends in the data, in bytes."""
    if not isinstance(tensor, dict):
        raise _Bad(f"tensor {name} is no JSON object")
    dtype, shape, offsets = tensor.get("dtype"), tensor.get("shape"), tensor.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _Bad(f"tensor {name} has the unknown dtype {dtype!r:.60}")
    if not _are_sizes(shape):
        raise _Bad(f"tensor {name} has the shape {shape!r:.60}, which is no list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _Bad(f"tensor {name} has the data_offsets {offsets!r:.60}, which are no beginning and end")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * _BITS[dtype]:
        raise _Bad(f"tensor {name} has {end - begin} bytes, which is not {dtype} of the shape {shape!r:.60}")
    return begin, end


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value)
