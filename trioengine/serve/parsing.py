"""Parsing of clients' input: JSON bodies and messages, and queries.

An unknown parameter of a query is refused by its name, never ignored. JSON is UTF-8, without the constants that only
Python's reader accepts, and nested at most 64 levels deep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar
from urllib.parse import parse_qsl

from trioengine.actors.ports import Ports
from trioengine.core.checks import number
from trioengine.core.wording import brief, did_you_mean
from trioengine.serve.errors import ClientError
from trioengine.serve.http import HttpRequest

T = TypeVar("T")
Parameters: TypeAlias = Mapping[str, Sequence[str]]  # values of a query, by name
MAX_DEPTH = 64  # objects and lists within each other; Python can neither read nor show many more
LONG_JSON = 1 << 16  # bytes of a body, or characters of a message; longer ones are parsed in a thread
_SURROGATE = r"\\u[dD][89a-fA-F]"  # an escape of half of a pair, or of one of its halves
_SURROGATE_IN_TEXT, _SURROGATE_IN_BYTES = re.compile(_SURROGATE), re.compile(_SURROGATE.encode())
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_SHOWN = 120  # characters of a name
_MAX_DIGITS = 15  # of an integer in a query
_SHOWN_VALUE = 80  # characters of a value
_LISTED = 8  # names, at most


async def in_thread_if(is_long: bool, ports: Ports, function: Callable[[], T]) -> T:
    """Call a function without side effects, in a thread if it takes long; cancelled, its result is dropped."""
    if not is_long:
        return function()
    result: T = await ports.run_in_thread(function)
    return result


# ---- JSON ---------------------------------------------------------------------------------------------------------


class _NotJson(ValueError):
    """A constant that only Python's reader accepts."""


def load_object(data: str | bytes, source: str, code: str = "invalid_type") -> Mapping[str, Any]:
    """Load a JSON object from `source`, which is "the body" or "the message".

    Raises ClientError, with this `code` for JSON other than an object.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        raise ClientError("invalid_json", f"{source} is not UTF-8") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(source) from None
    except _NotJson as exc:
        raise ClientError("invalid_json", f"{source} is not JSON: {exc}") from None
    except json.JSONDecodeError as exc:
        fault = f"is not JSON: line {exc.lineno}, column {exc.colno}" if text.strip() else "is empty"
        raise ClientError("invalid_json", f"{source} {fault}") from None
    except ValueError:
        raise ClientError("invalid_json", f"{source} is not JSON") from None
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value, source)
    if not isinstance(value, dict):
        raise ClientError(code, f"{source} is not a JSON object")
    return value


def load_body(body: bytes) -> Mapping[str, Any]:
    """Load the JSON object in a body, whose strings are Unicode. Raises ClientError."""
    fields = load_object(body, "the body")
    check_unicode(fields, body)
    return fields


def check_unicode(fields: Mapping[str, Any], data: str | bytes) -> None:
    """Raise ClientError for a string with half of a surrogate pair in the object that was loaded from this JSON."""
    if _SURROGATE_IN_TEXT.search(data) if isinstance(data, str) else _SURROGATE_IN_BYTES.search(data):
        _check_text(fields)


def _check_text(value: object, where: str = "") -> None:
    """Raise ClientError for a string with half of a surrogate pair, which is not Unicode; `where` is its path."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if not _is_text(name):
                name = where or "the body"
                raise ClientError(
                    "invalid_value", f"{name} has a name with half of a surrogate pair", param=where or None
                )
            _check_text(entry, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_text(entry, f"{where}[{index}]")
    elif isinstance(value, str) and not _is_text(value):
        raise ClientError("invalid_value", f"{where} has half of a surrogate pair", param=where)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_depth(value: object, source: str) -> None:
    """Raise ClientError for deeper nesting. Iterative, because recursion is the danger to guard against."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise _too_deep(source)


def _children(value: object) -> list[object]:
    """Return the objects and lists directly in an object or a list."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [entry for entry in entries if isinstance(entry, dict | list)]


def _too_deep(source: str) -> ClientError:
    return ClientError("invalid_json", f"{source} is nested deeper than {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is not a JSON number")


# ---- fields -------------------------------------------------------------------------------------------------------


def is_number(value: object) -> bool:
    """Whether a value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Return a client's value for a message: JSON of at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…"


def either(choices: Sequence[str]) -> str:
    """Join choices to a text: a, b or c."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def as_served(message: str, own: str, model: str) -> str:
    """Rewrite an engine's message to call the model by the name that clients use, in place of the engine's `own`."""
    return message.replace(f"model {own!r}", f"model {model!r}")


def unknown(kind: str, name: str, names: Collection[str], prefix: str = "") -> ClientError:
    """Name an unknown field or parameter with its path, and the nearest of the known `names`, or all."""
    param = (prefix + name)[:_SHOWN]
    hint = did_you_mean(name, names, prefix)
    if not hint and 0 < len(names) <= _LISTED:
        hint = f"; the {kind}s are {', '.join(sorted(names))}"
    return ClientError("unsupported_parameter", f"unknown {kind} {param!r}{hint}", param=param)


# ---- queries ------------------------------------------------------------------------------------------------------


def read_query(query: str, names: Collection[str]) -> Parameters:
    """Return the parameters in a query, each of which must have one of these names. Raises ClientError."""
    given: dict[str, list[str]] = {name: [] for name in names}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in given:
            raise unknown("parameter", name, names)
        given[name].append(value)
    return given


def parameters_of(request: HttpRequest, names: Collection[str]) -> Parameters:
    """Return the parameters of a request that has them in its query, and no body. Raises ClientError."""
    if request.body.strip() not in (b"", b"{}"):
        raise ClientError("invalid_value", f"{request.path} takes its parameters in its query, and no body")
    return read_query(request.query, names)


def one_of(parameters: Parameters, name: str, choices: Sequence[str]) -> str:
    """Return one of the choices, by default the first. Raises ClientError."""
    value = _single(parameters, name, choices[0])
    if value not in choices:
        message = f"{name} must be {either(choices)}, got {brief(value)}"
        raise ClientError("invalid_value", message, param=name)
    return value


def some_of(parameters: Parameters, name: str, choices: Collection[str]) -> list[str] | None:
    """Return some of the choices, separated by commas or given several times; None without any. Raises ClientError."""
    if not parameters[name]:
        return None
    values = [value for given in parameters[name] for value in given.split(",")]
    for value in values:
        if value not in choices:
            message = f"{name} must be some of {', '.join(sorted(choices))}, got {brief(value)}"
            raise ClientError("invalid_value", message, param=name)
    return values


def flag_in(parameters: Parameters, name: str, default: bool) -> bool:
    """Return a boolean. Raises ClientError."""
    value = _single(parameters, name, str(default).lower())
    if value not in _FLAGS:
        raise ClientError("invalid_value", f"{name} must be true or false, got {brief(value)}", param=name)
    return _FLAGS[value]


def number_in(parameters: Parameters, name: str, low: float, high: float) -> float | None:
    """Return a number, or None if it is absent. Raises ClientError."""
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


def count_in(parameters: Parameters, name: str) -> int | None:
    """Return an integer of at most 15 digits, or None if it is absent. Raises ClientError."""
    text = text_in(parameters, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ClientError("invalid_value", f"{name} must be an integer from 0, got {brief(text)}", param=name)
    return int(text)


def text_in(parameters: Parameters, name: str) -> str | None:
    """Return a text, or None if it is absent. Raises ClientError."""
    return _single(parameters, name, "") if parameters[name] else None


def _single(parameters: Parameters, name: str, default: str) -> str:
    given = parameters[name]
    if len(given) > 1:
        raise ClientError("invalid_value", f"{name} is given {len(given)} times", param=name)
    return given[0] if given else default
