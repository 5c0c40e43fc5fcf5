"""The messages of a conversation in OpenAI's shape, as the engine's templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trioengine.serve.fields import check_fixed, known_fields, text_of
from trioengine.serve.problem import ClientError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # and the templates'
_FIXED: Mapping[str, tuple[Any, ...]] = {"tool_calls": ([],), "annotations": ([],)}  # in answers that come back
_FIELDS = frozenset({"role", "content", *_FIXED})


def parse_messages(value: object) -> list[dict[str, str]]:
    """Messages with one string for each content. Raises ClientError."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        code = "missing_parameter" if value is None else "invalid_value" if isinstance(value, list) else "invalid_type"
        raise ClientError(code, "messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ClientError("invalid_type", f"{where} must be an object", param=where)
    fields = {name: field for name, field in value.items() if field is not None}
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        message = f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.60}"
        code = "invalid_value" if role is None or isinstance(role, str) else "invalid_type"
        raise ClientError(code, message, param=f"{where}.role")
    known_fields(fields, _FIELDS, where)
    check_fixed(fields, _FIXED, where)
    return {"role": _ROLES[role], "content": _content(fields.get("content"), f"{where}.content")}


def _content(value: object, where: str) -> str:
    if isinstance(value, str):
        return text_of(value, where)
    if not isinstance(value, Sequence) or not value:
        code = "invalid_value" if isinstance(value, list) else "invalid_type"
        raise ClientError(code, f"{where} must be a string or a list of text parts", param=where)
    return "".join([_part(part, f"{where}[{index}]") for index, part in enumerate(value)])


def _part(value: object, where: str) -> str:
    if isinstance(value, Mapping) and value.get("type") != "text":
        shown = f"{value.get('type')!r:.60}"
        raise ClientError("unsupported_content", f"{where}.type must be text, got {shown}", param=f"{where}.type")
    return text_of(known_fields(value, ("type", "text"), where).get("text"), f"{where}.text")
