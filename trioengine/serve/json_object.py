"""JSON as clients send it: UTF-8 and nothing that only Python's reader takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from trioengine.serve.problem import ClientError


def load_object(data: str | bytes, what: str, code: str = "invalid_type") -> Mapping[str, Any]:
    """The object in `what`, as "the body" or "the message"; `code` is for JSON that is none. Raises ClientError."""
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        raise ClientError("invalid_json", f"{what} is not UTF-8") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ClientError("invalid_json", f"{what} is not JSON") from None
    if not isinstance(value, dict):
        raise ClientError(code, f"{what} is not a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
