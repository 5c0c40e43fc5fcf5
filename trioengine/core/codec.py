"""Messages to bytes and back: a frame is a little-endian u32 length and a payload, which is one msgpack map.

The map holds the message's wire name under "type" and its fields by name. Dataclasses inside it are arrays of their
fields, token ids are little-endian int32 bytes, Enum members their values. The converters are made once, from the
dataclasses' annotations; `decode` raises RemoteProtocolError for a payload that does not fit them exactly.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import sys
import types
import typing
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgpack

from trioengine.core.errors import LocalProtocolError, RemoteProtocolError
from trioengine.core.messages import WIRE_NAMES, Message
from trioengine.core.sampling_params import SamplingParams

LENGTH = struct.Struct("<I")
_TYPE = "type"


def encode(message: Message) -> bytes:
    """Return the message's payload. Raises LocalProtocolError if a value cannot be packed."""
    name, fields = _SCHEMAS[type(message)]
    packed: dict[str, Any] = {_TYPE: name}
    for field, converter in fields:
        packed[field] = converter.pack(getattr(message, field))
    try:
        return msgpack.packb(packed, use_bin_type=True)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError) as exc:
        raise LocalProtocolError(f"{name} cannot be packed: {exc}") from exc


def decode(payload: bytes | memoryview) -> Message:
    """Return the message in a payload. Raises RemoteProtocolError unless it is exactly one."""
    try:
        packed = msgpack.unpackb(payload, strict_map_key=False)
    except Exception as exc:  # msgpack raises a dozen types, ValueError's children and others, for malformed input
        raise RemoteProtocolError(f"a frame is not msgpack: {type(exc).__name__}") from exc
    if not isinstance(packed, dict) or not isinstance(packed.get(_TYPE), str):
        raise RemoteProtocolError("a frame is not a map with a type")
    name = packed.pop(_TYPE)
    cls = _CLASSES.get(name)
    if cls is None:
        raise RemoteProtocolError(f"unknown message type {name[:40]!r}")
    _, fields = _SCHEMAS[cls]
    if len(packed) != len(fields) or any(field not in packed for field, _ in fields):
        raise RemoteProtocolError(f"{name}: unexpected or missing fields")
    try:
        return cls(**{field: converter.unpack(packed[field]) for field, converter in fields})  # type: ignore[no-any-return]
    except _Mismatch as exc:
        raise RemoteProtocolError(f"{name}: {exc}") from exc


def frame(payload: bytes) -> bytes:
    """Put the payload's length in front of it."""
    return LENGTH.pack(len(payload)) + payload


class FrameBuffer:
    """Bytes from the pipe, which come in any portions, cut into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __bool__(self) -> bool:
        """Whether bytes are left."""
        return bool(self._data)

    def add(self, data: bytes | bytearray) -> None:
        self._data += data

    def next_payload(self, max_bytes: int) -> bytes | None:
        """Remove the first frame and return its payload; None when more bytes are needed.

        Raises RemoteProtocolError if the frame claims more than `max_bytes`.
        """
        if len(self._data) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._data)
        if length > max_bytes:
            raise RemoteProtocolError(f"a frame claims {length} bytes; the limit is {max_bytes}")
        end = LENGTH.size + length
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[LENGTH.size : end])
        del self._data[:end]
        return payload


# ---- converters ---------------------------------------------------------------------------------------------------


class _Mismatch(Exception):
    """A value does not have the type that the message's field wants."""


class _Converter(NamedTuple):
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    plain: frozenset[type] = frozenset()  # values of these types are packed and unpacked unchanged


def _exactly(kind: type) -> _Converter:
    def unpack(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return _Converter(lambda value: value, unpack, frozenset({kind}))


def _unpack_float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _Mismatch(f"expected float, got {type(value).__name__}")
    return float(value)


def _pack_token_ids(ids: array[int]) -> bytes:
    return (ids if sys.byteorder == "little" else _swapped(ids)).tobytes()


def _unpack_token_ids(value: Any) -> array[int]:
    if type(value) is not bytes or len(value) % 4:
        raise _Mismatch("expected token ids as int32 bytes")
    ids = array("i", value)
    return ids if sys.byteorder == "little" else _swapped(ids)


def _swapped(ids: array[int]) -> array[int]:
    swapped = ids[:]
    swapped.byteswap()
    return swapped


def _optional(inner: _Converter) -> _Converter:
    return _Converter(
        lambda value: None if value is None else inner.pack(value),
        lambda value: None if value is None else inner.unpack(value),
        inner.plain | {types.NoneType},
    )


def _tuple_of(item: _Converter) -> _Converter:
    def unpack(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _Mismatch(f"expected an array, got {type(value).__name__}")
        return tuple([item.unpack(entry) for entry in value])

    return _Converter(lambda value: [item.pack(entry) for entry in value], unpack)


def _map_of(key: _Converter, item: _Converter) -> _Converter:
    def unpack(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _Mismatch(f"expected a map, got {type(value).__name__}")
        return {key.unpack(k): item.unpack(v) for k, v in value.items()}

    return _Converter(lambda value: {key.pack(k): item.pack(v) for k, v in value.items()}, unpack)


def _enum(kind: type[enum.Enum]) -> _Converter:
    def unpack(value: Any) -> enum.Enum:
        try:
            return kind(value)
        except ValueError:
            raise _Mismatch(f"{str(value)[:40]!r} is not a value of {kind.__name__}") from None

    return _Converter(lambda member: member.value, unpack)


def _dataclass(cls: type) -> _Converter:
    fields = _fields(cls)
    make = SamplingParams.of_valid if cls is SamplingParams else cls  # the engine has validated them
    # Conversions by the types of the packed fields: there is a row for each token, and most of its fields are plain.
    conversions: dict[tuple[type, ...], list[tuple[int, Callable[[Any], Any]]]] = {}

    def pack(value: Any) -> list[Any]:
        return [converter.pack(getattr(value, name)) for name, converter in fields]

    def unpack(value: Any) -> Any:
        if type(value) is not list or len(value) != len(fields):
            raise _Mismatch(f"expected {cls.__name__} as an array of {len(fields)}")
        shape = tuple(map(type, value))
        known = conversions.get(shape)
        wanted = _conversions(fields, shape) if known is None else known
        for index, convert in wanted:
            value[index] = convert(value[index])
        if known is None:  # and the values fit; few combinations of types occur
            conversions[shape] = wanted
        return make(*value)

    return _Converter(pack, unpack)


def _conversions(
    fields: list[tuple[str, _Converter]], shape: tuple[type, ...]
) -> list[tuple[int, Callable[[Any], Any]]]:
    return [
        (index, converter.unpack)
        for index, ((_, converter), kind) in enumerate(zip(fields, shape, strict=True))
        if kind not in converter.plain
    ]


def _converter(annotation: Any) -> _Converter:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return _optional(_converter(inner))
    if annotation is array:
        return _Converter(_pack_token_ids, _unpack_token_ids)
    if origin is tuple:
        return _tuple_of(_converter(args[0]))
    if origin is Mapping:
        return _map_of(_converter(args[0]), _converter(args[1]))
    if annotation is float:
        return _Converter(float, _unpack_float, frozenset({float}))
    if annotation in (int, str, bool, bytes):
        return _exactly(annotation)
    if issubclass(annotation, enum.Enum):
        return _enum(annotation)
    return _dataclass(annotation)


def _fields(cls: type) -> list[tuple[str, _Converter]]:
    hints = typing.get_type_hints(cls)
    return [(field.name, _converter(hints[field.name])) for field in dataclasses.fields(cls)]


_SCHEMAS: dict[type, tuple[str, list[tuple[str, _Converter]]]] = {
    cls: (name, _fields(cls)) for cls, name in WIRE_NAMES.items()
}
_CLASSES: dict[str, Any] = {name: cls for cls, name in WIRE_NAMES.items()}
