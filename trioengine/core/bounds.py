"""What a value may be: each check gives the value as a plain int or float, or raises ValueError with the rule."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import reprlib
from typing import Any

from trioengine.core.printable import printable

MAX_COUNT = 2**31 - 1  # of tokens, sequences, …: what an int32 holds
MAX_INT64 = 2**63 - 1  # what msgpack and torch hold
MAX_FLOAT32 = 3.4e38
_SHOWN = 80  # characters

_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _SHOWN


def changed_fields(value: Any) -> str:
    """The repr of a dataclass with the fields that are not at their defaults."""
    names = [field.name for field in dataclasses.fields(value) if _is_shown(value, field)]
    return f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in names)})"


def _is_shown(value: Any, field: dataclasses.Field[Any]) -> bool:
    make_default = field.default_factory
    default = field.default if make_default is dataclasses.MISSING else make_default()
    return field.repr and bool(getattr(value, field.name) != default)


def integer(value: Any, low: int, high: int) -> int:
    """Of whatever is an integer to Python, numpy's among them; the bounds are allowed, a bool is no integer."""
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or not low <= count <= high:
        raise ValueError(f"must be an integer from {low} to {high}, got {brief(value)}")
    return count


def number(value: Any, low: float, high: float, *, above: bool = False) -> float:
    """The bounds are allowed, or only the upper one where it must be `above`; nan, infinity and bools are out."""
    try:
        # float first: an abstract class takes its time
        is_number = isinstance(value, (float, numbers.Real)) and not isinstance(value, bool)
        converted = float(value) if is_number else math.nan
    except OverflowError:  # an integer that no float holds
        converted = math.nan
    if low <= converted <= high and not (above and converted == low):
        return converted
    rule = f"above {low} and at most {high}" if above else f"from {low} to {high}"
    raise ValueError(f"must be a number {rule}, got {brief(value)}")


def is_key(value: object) -> bool:
    """A key of a client: visible ASCII characters, as a header can bring them."""
    return isinstance(value, str) and bool(value) and all("!" <= character <= "~" for character in value)


def brief(value: object) -> str:
    """The value's repr for a message: at most 80 characters, control characters escaped, little memory spent."""
    try:
        text = repr(value[:_SHOWN]) if isinstance(value, str | bytes) else _REPR.repr(value)
    except (ValueError, RecursionError):  # more digits or levels than Python prints
        return "a value too long to show"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def counted(count: int, noun: str) -> str:
    """The count with its noun, in the plural unless there is one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def excerpt(text: str, length: int = 200) -> str:
    """A message of another library about a file, printable on one line of at most `length` characters."""
    shown = printable(text[:length])
    return shown if len(shown) <= length else shown[: length - 1] + "…"
