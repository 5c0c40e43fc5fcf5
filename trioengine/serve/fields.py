"""Reading the fields of what a client sends: what we do not know is refused by its name, never ignored."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from trioengine.core.bounds import brief, did_you_mean
from trioengine.serve.problem import ClientError

_SHOWN = 120  # characters of a name
_SHOWN_VALUE = 80
_LISTED = 8  # names, at most
_MAX_METADATA = 16


def known_fields(value: object, names: Collection[str], where: str = "") -> Mapping[str, Any]:
    """An object that has no other fields than these; without `where` it is the whole of a body. Raises ClientError."""
    if not isinstance(value, Mapping):
        raise ClientError("invalid_type", f"{where or 'the body'} must be an object", param=where or None)
    for name in value:
        if name not in names:
            raise unknown("field", name, names, f"{where}." if where else "")
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


def flag_of(value: object, where: str) -> bool:
    """True or false; null is false. Raises ClientError."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ClientError("invalid_type", f"{where} must be true or false, got {shown(value)}", param=where)


def shown(value: object) -> str:
    """A value of a client for a message: JSON of at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…"


def in_json(message: str, value: object) -> str:
    """A message of the engine, which may end with this value as Python writes it."""
    quoted = brief(value)
    return message.removesuffix(quoted) + shown(value) if message.endswith(f", got {quoted}") else message


def as_served(message: str, own: str, model: str) -> str:
    """A message of the engine, in which the model has the name that clients know in place of the engine's own."""
    return message.replace(f"model {own!r}", f"model {model!r}")


def is_number(value: object) -> bool:
    """Whether it is what JSON calls a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def metadata_of(value: object, where: str) -> Mapping[str, str] | None:
    """A few short strings by their names, or null. Raises ClientError."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ClientError("invalid_type", f"{where} must be an object", param=where)
    if len(value) > _MAX_METADATA or not all(
        isinstance(text, str) and len(key) <= 64 and len(text) <= 512 for key, text in value.items()
    ):
        raise ClientError("invalid_value", f"{where} must map at most {_MAX_METADATA} keys to strings", param=where)
    return value


def check_fixed(fields: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Each of these fields says one of the values that are built, or is null or absent. Raises ClientError."""
    for name, allowed in fixed.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(choice) and value == choice for choice in allowed):
            param = f"{where}.{name}" if where else name
            message = f"{param} {_rule(allowed)}, got {shown(value)}"
            if allowed == ([],):
                message = f"this server does not support {param}"
            raise ClientError("unsupported_parameter", message, param=param)


def _rule(allowed: tuple[Any, ...]) -> str:
    return "must be " + " or ".join(map(shown, allowed)) if allowed else "is not supported"


def unknown(kind: str, name: str, names: Collection[str], prefix: str = "") -> ClientError:
    """The error of a field or parameter, with the nearest of the known `names`, or all; the prefix is the way to it."""
    param = (prefix + name)[:_SHOWN]
    hint = did_you_mean(name, names, prefix)
    if not hint and 0 < len(names) <= _LISTED:
        hint = f"; the {kind}s are {', '.join(sorted(names))}"
    message = f"unknown {kind} {param!r}{hint}"
    return ClientError("unsupported_parameter", message, param=param)
