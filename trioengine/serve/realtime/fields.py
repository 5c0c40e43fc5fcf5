"""Reading the fields of a client's event: what we do not know is refused by its name, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trioengine.serve.problem import ClientError


def known_fields(value: object, names: Iterable[str], where: str) -> Mapping[str, Any]:
    """An object that has no other fields than these. Raises ClientError."""
    if not isinstance(value, Mapping):
        raise ClientError("invalid_type", f"{where} must be an object", param=where)
    for name in value:
        if name not in names:
            param = f"{where}.{name}"[:120]
            raise ClientError("unsupported_parameter", f"{param} is not supported", param=param)
    return value


def text_of(value: object, where: str) -> str:
    """A string that is Unicode text. Raises ClientError."""
    if not isinstance(value, str):
        raise ClientError("invalid_type", f"{where} must be a string", param=where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ClientError("invalid_value", f"{where} has half of a surrogate pair", param=where) from None
    return value
