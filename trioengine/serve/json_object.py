"""JSON as clients send it: UTF-8, nothing that only Python's reader takes, and no deeper than anybody needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from trioengine.serve.problem import ClientError


class _NotJson(ValueError):
    """A constant that only Python's reader takes."""


MAX_DEPTH = 64  # objects and lists within each other; Python can neither read nor show many more


def load_object(data: str | bytes, what: str, code: str = "invalid_type") -> Mapping[str, Any]:
    """The object in `what`, as "the body" or "the message"; `code` is for JSON that is none. Raises ClientError."""
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        raise ClientError("invalid_json", f"{what} is not UTF-8") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise _too_deep(what) from None
    except _NotJson as exc:
        raise ClientError("invalid_json", f"{what} is not JSON: {exc}") from None
    except json.JSONDecodeError as exc:
        fault = f"is not JSON: line {exc.lineno}, column {exc.colno}" if text.strip() else "is empty"
        raise ClientError("invalid_json", f"{what} {fault}") from None
    except ValueError:
        raise ClientError("invalid_json", f"{what} is not JSON") from None
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value, what)
    if not isinstance(value, dict):
        raise ClientError(code, f"{what} is not a JSON object")
    return value


def _check_depth(value: object, what: str) -> None:
    """Level by level: a stack of calls would be what is to be spared."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
    if level:
        raise _too_deep(what)


def _children(value: object) -> list[object]:
    """The objects and lists that are right in an object or a list, or of the value itself nothing."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [entry for entry in entries if isinstance(entry, dict | list)]


def _too_deep(what: str) -> ClientError:
    return ClientError("invalid_json", f"{what} is nested deeper than {MAX_DEPTH} levels")


def _no_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is no number of JSON")
