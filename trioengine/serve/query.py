"""The parameters in a request's query: what we do not know is refused by its name, never ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import parse_qsl

from trioengine.core.bounds import brief, number
from trioengine.serve.fields import unknown
from trioengine.serve.http import Request
from trioengine.serve.problem import ClientError

Parameters: TypeAlias = Mapping[str, Sequence[str]]  # by name, what was given

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def read_query(query: str, names: Collection[str]) -> Parameters:
    """The parameters in a query, each of which has one of these names. Raises ClientError."""
    given: dict[str, list[str]] = {name: [] for name in names}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in given:
            raise unknown("parameter", name, names)
        given[name].append(value)
    return given


def parameters_of(request: Request, names: Collection[str]) -> Parameters:
    """The parameters of a request that has them in its query, and no body. Raises ClientError."""
    if request.body.strip() not in (b"", b"{}"):
        raise ClientError("invalid_value", f"{request.path} takes its parameters in its query, and no body")
    return read_query(request.query, names)


def one_of(parameters: Parameters, name: str, choices: Sequence[str]) -> str:
    """One of the choices; the first of them if none is given. Raises ClientError."""
    value = _single(parameters, name, choices[0])
    if value not in choices:
        *others, last = choices
        raise ClientError(
            "invalid_value", f"{name} must be {', '.join(others)} or {last}, got {brief(value)}", param=name
        )
    return value


def some_of(parameters: Parameters, name: str, choices: Collection[str]) -> list[str] | None:
    """Some of the choices, separated by commas or given several times; None if there are none. Raises ClientError."""
    if not parameters[name]:
        return None
    values = [value for given in parameters[name] for value in given.split(",")]
    for value in values:
        if value not in choices:
            message = f"{name} must be some of {', '.join(sorted(choices))}, got {brief(value)}"
            raise ClientError("invalid_value", message, param=name)
    return values


def flag_in(parameters: Parameters, name: str, default: bool) -> bool:
    """True or false. Raises ClientError."""
    value = _single(parameters, name, str(default).lower())
    if value not in _FLAGS:
        raise ClientError("invalid_value", f"{name} must be true or false, got {brief(value)}", param=name)
    return _FLAGS[value]


def number_in(parameters: Parameters, name: str, low: float, high: float) -> float | None:
    """A number, or None if it is not given. Raises ClientError."""
    text = _single(parameters, name, "")
    if not parameters[name]:
        return None
    try:
        value: object = float(text)
    except ValueError:
        value = text
    try:
        return number(value, low, high)
    except ValueError as exc:
        raise ClientError("invalid_value", f"{name} {exc}", param=name) from None


def _single(parameters: Parameters, name: str, default: str) -> str:
    given = parameters[name]
    if len(given) > 1:
        raise ClientError("invalid_value", f"{name} is given {len(given)} times", param=name)
    return given[0] if given else default
