"""The types that options have, and the one wording for a value of another type."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
_TOML = {bool: bool, int: int, float: float | int, str: str, Path: str}  # as tomllib gives them


def rule(kind: Any, low: float | None = None, high: float | None = None) -> str:
    """The rule for a value of the type, or for each of a list, between two bounds, which are allowed."""
    kind = element_of(kind)
    if typing.get_origin(kind) is Literal:
        return f"must be {_either(typing.get_args(kind))}"
    return f"must be {_WANTED[kind]}{_range(low, high)}"


def fits(value: object, kind: Any) -> bool:
    """Whether a value of TOML is one of the type; of a type of lists it is an element or a list."""
    if isinstance(value, list) and is_list(kind):
        return all(fits(each, element_of(kind)) for each in value)
    kind = element_of(kind)
    wanted = _TOML[str if typing.get_origin(kind) is Literal else kind]
    return isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))


def is_list(kind: Any) -> bool:
    """Whether an option may be given several times."""
    return typing.get_origin(kind) is list


def element_of(kind: Any) -> Any:
    """The type of one value of an option."""
    return typing.get_args(kind)[0] if is_list(kind) else kind


def _either(choices: Sequence[object]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"
