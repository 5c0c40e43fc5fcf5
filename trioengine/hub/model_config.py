"""The interface of model configurations, and the fields of the JSON files and metadata that they are read from.

Each field is checked as it is read. The size of a file is checked before it is read.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol, TypeAlias

from trioengine.core.checks import MAX_COUNT, MAX_FLOAT32, integer, number
from trioengine.core.errors import ModelError
from trioengine.core.image import ImageProcessing
from trioengine.core.wording import brief

Shape: TypeAlias = tuple[int, ...]  # rows first

Rows: TypeAlias = tuple[range, ...]  # of a stored tensor, in this order; all dimensions but the last number its rows


class JoinedTensor(NamedTuple):
    """A stored tensor that holds the rows of several of the model's."""

    name: str
    shape: Shape
    parts: Mapping[str, Rows]  # by the names of the model's tensors


STACKED = "{stacked}"  # in the name of a GGUF tensor whose first dimension numbers tensors of their own
MAX_MODEL_TENSORS = 100_000  # with each expert's; the largest Qwen3.5 has 93,000
_LEAST = 2.0**-126  # of float32's normal numbers
MAX_JSON = 8 << 20  # bytes; the index of Qwen3-Next has 7 million
MAX_VALUES = 1 << 18  # in a JSON text, counted by its separators; at most about 110 bytes of memory each


class StatePart(NamedTuple):
    """A tensor of a sequence's state: in the model's dtype, or always in float32."""

    shape: Shape
    is_float32: bool = False


class TextConfig(Protocol):
    """The shape of a decoder, as far as caches and the choice of kernels depend on it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def embeds(self) -> bool:
        """Whether it is an embedding model: hidden states are its results, and it has no head."""
        ...

    @property
    def num_kv_layers(self) -> int:
        """The layers with keys and values."""
        ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer: the tokens that a query sees, itself among them; None: all before it."""
        ...

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The parts of a sequence's state, in the order of the layers: one or two of each layer that has a state."""
        ...

    @property
    def has_states(self) -> bool:
        """Whether a layer has a state."""
        ...

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts in place of one MLP."""
        ...


class ModelConfig(Protocol):
    """The configuration of one architecture: a frozen dataclass. Equal configurations mean interchangeable weights."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def model_type(self) -> str:
        """The `model_type` of config.json, or the `general.architecture` of a GGUF file."""
        ...

    @property
    def text(self) -> TextConfig:
        """The decoder: its vocabulary, its context, and the heads of the KV cache."""
        ...

    @property
    def images(self) -> ImageProcessing | None:
        """The preprocessing of images; None for a model of texts only."""
        ...

    def wanted_tensors(self) -> dict[str, Shape]:
        """Return the shape of every tensor that the model needs, by its Hugging Face name."""
        ...

    def optional_tensors(self) -> dict[str, Shape]:
        """Return the shapes of the tensors that a checkpoint may have beside these."""
        ...

    def joined_tensors(self) -> Iterator[JoinedTensor]:
        """Yield the tensors that a directory or a GGUF file may have in place of several."""
        ...

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The beginnings of the names of tensors that belong to parts which are not computed."""
        ...


class Fields:
    """Values by name; every ModelError names the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        """`prefix` precedes the names of fields in messages."""
        self.path = path
        self._values = values
        self._prefix = prefix

    def bad(self, field: str, rule: str, default: Any = None) -> ModelError:
        """Return the error for a field whose value, or whose default, violates the rule."""
        value = self.get(field)
        return ModelError(
            f"{self.path}: {self._prefix}{field} {rule}, got {brief(default if value is None else value)}"
        )

    def get(self, field: str) -> Any:
        """Return the unchecked value; None if it is absent."""
        return self._values.get(field)

    def names(self) -> list[str]:
        """Return the names of the fields that are there."""
        return list(self._values)

    def has(self, field: str) -> bool:
        """Return whether the field is there, maybe as null."""
        return field in self._values

    def defaulting(self, defaults: Mapping[str, Any]) -> Fields:
        """Return fields in which `defaults` replace absent or null ones."""
        given = {name: entry for name, entry in self._values.items() if entry is not None}
        return Fields(self.path, {**defaults, **given}, self._prefix)

    def without(self, *names: str) -> Fields:
        """Return the fields but for these."""
        return Fields(
            self.path, {name: value for name, value in self._values.items() if name not in names}, self._prefix
        )

    def string(self, field: str) -> str:
        """Return a string, or the `content` of an added token's object; "" if it is absent or null."""
        value = self.get(field)
        if isinstance(value, Mapping):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise self.bad(field, "must be a string")
        return value or ""

    def count(self, field: str, default: int | None = None) -> int:
        """Return an integer from 1 to 2**31 - 1; the `default`, if given, for an absent or null field."""
        value = self.get(field)
        try:
            return integer(default if value is None else value, 1, MAX_COUNT)
        except ValueError:
            raise self.bad(field, f"must be an integer from 1 to {MAX_COUNT}", default) from None

    def index(self, field: str, default: int) -> int:
        """Return an integer from 0 to 2**31 - 1; the `default` for an absent or null field."""
        value = self.get(field)
        try:
            return integer(default if value is None else value, 0, MAX_COUNT)
        except ValueError:
            raise self.bad(field, f"must be an integer from 0 to {MAX_COUNT}") from None

    def number(self, field: str, default: float | None = None) -> float:
        """Return a normal number of float32, above 0; the `default`, if given, for an absent or null field."""
        value = self.get(field)
        try:
            return number(default if value is None else value, _LEAST, MAX_FLOAT32)
        except ValueError:
            raise self.bad(field, f"must be a number above 0 and at most {MAX_FLOAT32}") from None

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a boolean; `default` for an absent or null field."""
        value = self.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.bad(field, "must be true or false")
        return default if value is None else bool(value)

    def object(self, field: str, defaults: Mapping[str, Any] | None = None) -> Fields:
        """Return the fields of an object, none if it is absent or null; `defaults` replace absent or null fields."""
        value = self.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(field, "must be an object")
        return Fields(self.path, value or {}, f"{self._prefix}{field}.").defaulting(defaults or {})

    def numbers(self, field: str, count: int, default: float, low: float) -> tuple[float, ...]:
        """Return `count` numbers from `low` up in float32's range; all are `default` for an absent or null field."""
        value = self.get(field)
        entries = [default] * count if value is None else value
        try:
            if not isinstance(entries, list) or len(entries) != count:
                raise ValueError
            return tuple(number(entry, low, MAX_FLOAT32) for entry in entries)
        except ValueError:
            raise self.bad(field, f"must be {count} numbers from {low} to {MAX_FLOAT32}") from None

    def token_ids(self, field: str, vocab_size: int) -> tuple[int, ...]:
        """Return one token id or a list of them; empty for an absent or null field."""
        value = self.get(field)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
            raise self.bad(field, f"must be token ids below {vocab_size}")
        return tuple(dict.fromkeys(ids))


def read_json(path: Path, *, required: bool = False) -> Fields:
    """Read the fields of a JSON object; none if the file is absent and not required. Raises ModelError."""
    if not required and not path.exists():
        return Fields(path, {})
    fields = _read_value(path)
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: not a JSON object")
    return Fields(path, fields)


def read_objects(path: Path) -> list[Fields]:
    """Read the fields of each object of a JSON list. Raises ModelError."""
    objects = _read_value(path)
    if not isinstance(objects, list) or not all(isinstance(each, dict) for each in objects):
        raise ModelError(f"{path}: not a list of JSON objects")
    return [Fields(path, each, f"[{index}].") for index, each in enumerate(objects)]


def _read_value(path: Path) -> Any:
    try:
        return parse_json(read_file(path, MAX_JSON))
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8") from None
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: not JSON: {exc}") from exc


def parse_json(data: bytes, **options: Any) -> Any:
    """Parse as `json.loads` does. Raises ValueError or RecursionError, also for more than MAX_VALUES values."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    return json.loads(data.decode(), **options)


def read_text(path: Path) -> str:
    """Read a UTF-8 text of at most MAX_JSON bytes. Raises ModelError."""
    try:
        return read_file(path, MAX_JSON).decode()
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8") from None


def read_file(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes. Raises ModelError."""
    with open_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ModelError(f"{path}: the file is larger than {limit} bytes")
    return data


def open_file(path: Path) -> BinaryIO:
    """Open a regular file; pipes and devices could block. Raises ModelError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path}: not a regular file")
        return path.open("rb")
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
