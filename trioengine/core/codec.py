"""Messages to bytes and back: a frame is a little-endian u32 length and a payload, which is one msgpack map.

The map holds the message's wire name under "type" and its fields by name. A dataclass inside it is an array of its
fields. A tuple of dataclasses is an array of columns, one for each field; a column in which every value is None is nil,
as most columns of a step's rows are. Token ids are little-endian int32 bytes, Enum members their values. Packing and
unpacking follow the annotations, and `decode` raises RemoteProtocolError for a payload that does not fit them exactly.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import sys
import types
import typing
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import contains
from typing import Any, NamedTuple

import msgpack

from trioengine.core.errors import LocalProtocolError, RemoteProtocolError
from trioengine.core.messages import WIRE_NAMES, Message
from trioengine.core.sampling_params import ResolvedParams, params_of_valid

LENGTH = struct.Struct("<I")
_TYPE = "type"
_CLASSES = {name: cls for cls, name in WIRE_NAMES.items()}


def encode(message: Message) -> bytes:
    """Return the message's payload. Raises LocalProtocolError if a value cannot be packed."""
    name, record = WIRE_NAMES[type(message)], _RECORDS[type(message)]
    try:
        packed = dict(zip(record.names, record.pack(message), strict=True))
        payload: bytes = msgpack.packb({_TYPE: name, **packed}, default=_pack)
    except (TypeError, AttributeError, ValueError, OverflowError) as exc:
        raise LocalProtocolError(f"{name} cannot be packed: {exc}") from exc
    return payload


def decode(payload: bytes | memoryview) -> Message:
    """Return the message in a payload. Raises RemoteProtocolError unless it is exactly one."""
    try:
        packed = msgpack.unpackb(payload, strict_map_key=False)
    except Exception as exc:  # msgpack raises a dozen types, ValueError's children and others, for malformed input
        raise RemoteProtocolError(f"a frame is not msgpack: {type(exc).__name__}") from exc
    if not isinstance(packed, dict) or not isinstance(packed.get(_TYPE), str):
        raise RemoteProtocolError("a frame is not a map with a type")
    name = packed.pop(_TYPE)
    if name not in _CLASSES:
        raise RemoteProtocolError(f"unknown message type {name[:40]!r}")
    record = _RECORDS[_CLASSES[name]]
    if packed.keys() != record.kinds.keys():
        raise RemoteProtocolError(f"{name}: unexpected or missing fields")
    try:
        return record.unpack([packed[field] for field in record.names])  # type: ignore[no-any-return]
    except _Mismatch as exc:
        raise RemoteProtocolError(f"{name}: {exc}") from exc


def frame(payload: bytes) -> bytes:
    """Put the payload's length in front of it."""
    return LENGTH.pack(len(payload)) + payload


class FrameBuffer(bytearray):
    """Bytes from the pipe, to which they are added in any portions, cut into frames."""

    def next_payload(self, max_bytes: int) -> bytes | None:
        """Remove the first frame and return its payload; None when more bytes are needed.

        Raises RemoteProtocolError if the frame claims more than `max_bytes`.
        """
        if len(self) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self)
        if length > max_bytes:
            raise RemoteProtocolError(f"a frame claims {length} bytes; the limit is {max_bytes}")
        end = LENGTH.size + length
        if len(self) < end:
            return None
        payload = bytes(memoryview(self)[LENGTH.size : end])
        del self[:end]
        return payload


# ---- fields -------------------------------------------------------------------------------------------------------


def _pack(value: Any) -> Any:
    """Return a value as one that msgpack has a type for; msgpack calls this for each other value that it meets."""
    if type(value) is array:
        return (value if sys.byteorder == "little" else _swapped(value)).tobytes()
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"msgpack has no type for {type(value).__name__}")


class _Mismatch(Exception):
    """A packed value does not have the type that its field wants."""


class _Kind(NamedTuple):
    """The type of a field. Packed values of the `plain` types are its values; others are for `unpack` to convert."""

    plain: frozenset[type]
    unpack: Callable[[Any], Any]  # raises _Mismatch
    pack: Callable[[Any], Any] | None = None  # for msgpack, which calls `_pack`; None: the value as it is


class _Record:
    """A dataclass, packed as an array of its fields."""

    def __init__(self, cls: type) -> None:
        hints = typing.get_type_hints(cls)
        self.names = [field.name for field in dataclasses.fields(cls)]
        self.kinds = {name: _kind(hints[name]) for name in self.names}
        self._plain = [kind.plain for kind in self.kinds.values()]
        self._packed = [(i, kind.pack) for i, kind in enumerate(self.kinds.values()) if kind.pack is not None]
        self._name, self._length = cls.__name__, len(self.names)
        self._make = params_of_valid if cls is ResolvedParams else cls  # the engine has validated them

    def pack(self, record: Any) -> list[Any]:
        values = [getattr(record, name) for name in self.names]
        for i, pack in self._packed:
            values[i] = pack(values[i])
        return values

    def unpack(self, values: Any) -> Any:
        if type(values) is not list or len(values) != self._length:
            raise _Mismatch(f"expected {self._name} as an array of {self._length}")
        if not all(map(contains, self._plain, map(type, values))):
            values = map(self._field, self.kinds, values)
        return self._make(*values)

    def _field(self, name: str, value: Any) -> Any:
        plain, unpack, _ = self.kinds[name]
        try:
            return value if type(value) in plain else unpack(value)
        except _Mismatch as exc:
            raise _Mismatch(f"{name}: {exc}") from None

    def pack_all(self, records: Sequence[Any]) -> list[list[Any] | None]:
        """The columns of many records. The first one is never nil: it has their number."""
        columns: list[list[Any] | None] = []
        for name, kind in self.kinds.items():
            column = [getattr(record, name) for record in records]
            if columns and column.count(None) == len(column):
                columns.append(None)
            else:
                columns.append(column if kind.pack is None else list(map(kind.pack, column)))
        return columns

    def unpack_all(self, columns: Any) -> tuple[Any, ...]:
        if type(columns) is not list or len(columns) != self._length or type(columns[0]) is not list:
            raise _Mismatch(f"expected an array of {self._length} columns of {self._name}")
        count = len(columns[0])
        return tuple(map(self._make, *[self._column(name, columns[i], count) for i, name in enumerate(self.names)]))

    def _column(self, name: str, column: Any, count: int) -> Iterable[Any]:
        plain, unpack, _ = self.kinds[name]
        if column is None and (types.NoneType in plain or not count):
            return repeat(None, count)
        if type(column) is not list or len(column) != count:
            raise _Mismatch(f"{name}: expected a column of {count}")
        if plain.issuperset(map(type, column)):
            return column
        try:
            return [value if type(value) in plain else unpack(value) for value in column]
        except _Mismatch as exc:
            raise _Mismatch(f"{name}: {exc}") from None


def _record(cls: type) -> _Record:
    if cls not in _RECORDS:
        _RECORDS[cls] = _Record(cls)
    return _RECORDS[cls]


def _kind(annotation: Any) -> _Kind:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (_kind(arg) for arg in args if arg is not types.NoneType)
        pack = None if inner.pack is None else partial(_pack_optional, inner.pack)
        return _Kind(inner.plain | {types.NoneType}, inner.unpack, pack)
    if origin is tuple and isinstance(args[0], type) and dataclasses.is_dataclass(args[0]):
        record = _record(args[0])
        return _Kind(frozenset(), record.unpack_all, record.pack_all)
    if origin is tuple:
        return _Kind(frozenset(), partial(_unpack_tuple, _kind(args[0])))
    if origin is Mapping:
        return _Kind(frozenset(), partial(_unpack_map, _kind(args[0]), _kind(args[1])))
    if annotation is array:
        return _Kind(frozenset(), _unpack_token_ids)
    if annotation is float:
        return _Kind(frozenset({float}), _unpack_float)
    if annotation in (int, str, bool, bytes):
        return _Kind(frozenset({annotation}), partial(_refuse, annotation))
    if issubclass(annotation, enum.Enum):
        return _Kind(frozenset(), partial(_unpack_enum, annotation))
    return _Kind(frozenset(), _record(annotation).unpack, _record(annotation).pack)


def _pack_optional(pack: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else pack(value)


def _unpack_tuple(item: _Kind, value: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise _Mismatch(f"expected an array, got {type(value).__name__}")
    plain, unpack, _ = item
    return tuple([entry if type(entry) in plain else unpack(entry) for entry in value])


def _unpack_map(key: _Kind, item: _Kind, value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _Mismatch(f"expected a map, got {type(value).__name__}")
    (plain_key, unpack_key, _), (plain, unpack, _) = key, item
    return {
        k if type(k) in plain_key else unpack_key(k): v if type(v) in plain else unpack(v) for k, v in value.items()
    }


def _unpack_token_ids(value: Any) -> array[int]:
    if type(value) is not bytes or len(value) % 4:
        raise _Mismatch("expected token ids as int32 bytes")
    ids = array("i", value)
    return ids if sys.byteorder == "little" else _swapped(ids)


def _swapped(ids: array[int]) -> array[int]:
    swapped = ids[:]
    swapped.byteswap()
    return swapped


def _unpack_float(value: Any) -> float:
    if type(value) is int:
        return float(value)
    return _refuse(float, value)


def _unpack_enum(kind: type[enum.Enum], value: Any) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise _Mismatch(f"{str(value)[:40]!r} is not a value of {kind.__name__}") from None


def _refuse(kind: type, value: Any) -> typing.NoReturn:
    raise _Mismatch(f"expected {kind.__name__}, got {type(value).__name__}")


_RECORDS: dict[type, _Record] = {}  # of all messages, and of the dataclasses inside them
for _cls in WIRE_NAMES:
    _record(_cls)
