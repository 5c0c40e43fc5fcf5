"""The messages of a conversation in OpenAI's shape, as the engine's templates take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded
from trioengine.core.image import image_url
from trioengine.serve.fields import as_served, check_fixed, known_fields, shown, text_of
from trioengine.serve.problem import ClientError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # and the templates'
_FIXED: Mapping[str, tuple[Any, ...]] = {  # in answers that come back, but for names
    "tool_calls": ([],),
    "annotations": ([],),
    "name": (),
}
IMAGE = "image_url"  # the type of an image's part, and the field that has its URL
_FIELDS = frozenset({"role", "content", *_FIXED})


def image_refusal(engine: Engine, model: str) -> str:
    """The reason why the engine takes no images, which calls the model by its served name; empty if it takes them.

    While the model is not loaded it is empty: the engine itself refuses the request.
    """
    try:
        return as_served(engine.tokenizer.image_refusal, engine.config.model, model)
    except EngineOverloaded:
        return ""


def parse_messages(value: object, refusal: str) -> list[dict[str, Any]]:
    """Messages, each content one string, or a list of parts if it has images, with the URLs as they are.

    Raises ClientError or RequestRejected, for images with this `refusal` if it is not empty.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        code = "missing_parameter" if value is None else "invalid_value" if isinstance(value, list) else "invalid_type"
        raise ClientError(code, "messages must be a list of at least one message", param="messages")
    return [_message(message, f"messages[{index}]", refusal) for index, message in enumerate(value)]


def _message(value: object, where: str, refusal: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ClientError("invalid_type", f"{where} must be an object", param=where)
    fields = {name: field for name, field in value.items() if field is not None}
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        message = f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}"
        code = "invalid_value" if role is None or isinstance(role, str) else "invalid_type"
        raise ClientError(code, message, param=f"{where}.role")
    known_fields(fields, _FIELDS, where)
    check_fixed(fields, _FIXED, where)
    refusal = refusal if role == "user" else f"a message of the role {role} has no images"
    return {"role": _ROLES[role], "content": _content(fields.get("content"), f"{where}.content", refusal)}


def _content(value: object, where: str, refusal: str) -> str | list[Mapping[str, Any]]:
    if isinstance(value, str):
        return text_of(value, where)
    if value is None:
        raise ClientError("missing_parameter", f"{where} is missing", param=where)
    if not isinstance(value, Sequence) or not value:
        code = "invalid_value" if isinstance(value, list) else "invalid_type"
        raise ClientError(code, f"{where} must be a string or a list of parts, got {shown(value)}", param=where)
    parts = [_part(part, f"{where}[{index}]", refusal) for index, part in enumerate(value)]
    if any(part["type"] == IMAGE for part in parts):
        return parts
    return "".join([part["text"] for part in parts])


def _part(value: object, where: str, refusal: str) -> Mapping[str, Any]:
    kind = value.get("type") if isinstance(value, Mapping) else "text"
    if kind == IMAGE:
        return _image(value, where, refusal)
    if kind != "text":
        message = f"{where}.type must be text or {IMAGE}, got {shown(kind)}"
        raise ClientError("unsupported_content", message, param=f"{where}.type")
    return {"type": "text", "text": text_of(known_fields(value, ("type", "text"), where).get("text"), f"{where}.text")}


def _image(value: object, where: str, refusal: str) -> Mapping[str, Any]:
    if refusal:
        raise ClientError("images_not_supported", f"{where}: {refusal}", param=where)
    part = known_fields(value, ("type", IMAGE), where)
    if isinstance(part.get(IMAGE), Mapping):
        known_fields(part[IMAGE], ("url", "detail"), f"{where}.{IMAGE}")
    image_url(part, where)
    return part
