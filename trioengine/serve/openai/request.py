"""The request of a chat completion: each field is supported, ignored without harm, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded
from trioengine.core.image import image_url
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import (
    SAMPLING,
    as_served,
    check_fixed,
    flag_of,
    known_fields,
    load_object,
    metadata_of,
    sampling_params,
    shown,
    text_of,
)

_SAMPLING = {  # OpenAI's names of the fields of SamplingParams
    **SAMPLING,
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
_FIXED: Mapping[str, tuple[Any, ...]] = {  # the only values that are supported
    "n": (1,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
_LABELS = ("user", "safety_identifier", "prompt_cache_key")  # without effect here
_OTHERS = ("messages", "model", "logprobs", "stream", "stream_options", "metadata", "request_id")
MAX_ID = 128  # characters
_FIELDS = frozenset({*_SAMPLING, *_FIXED, *_LABELS, *_OTHERS})
_STREAM_FIXED: Mapping[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}
# of OpenAI, and the templates' names for them
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_FIXED: Mapping[str, tuple[Any, ...]] = {  # of answers that clients send back; names are not supported
    "tool_calls": ([],),
    "annotations": ([],),
    "name": (),
}
IMAGE = "image_url"  # the type of an image's part, and the field that has its URL
_MESSAGE_FIELDS = frozenset({"role", "content", *_MESSAGE_FIXED})


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request whose body was checked."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool  # in a stream
    request_id: str | None  # the client's own, for /abort_request


def parse_chat_request(body: bytes, model: str, image_refusal: str) -> ChatRequest:
    """Parse the body of a request to `model`, the only one. Raises ClientError or RequestRejected.

    `image_refusal` is the reason why the model takes no images, or empty.
    """
    given = load_object(body, "the body")
    fields = {name: value for name, value in given.items() if value is not None}
    known_fields(fields, _FIELDS)
    check_model(fields.get("model"), model)
    check_fixed(fields, _FIXED)
    for name in _LABELS:
        text_of(fields.get(name, ""), name)
    metadata_of(fields.get("metadata"), "metadata")
    stream = flag_of(fields.get("stream"), "stream")
    return ChatRequest(
        messages=parse_messages(fields.get("messages"), image_refusal),
        params=_params(fields),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        request_id=_id_of(fields["request_id"]) if "request_id" in fields else None,
    )


def _id_of(value: object) -> str:
    id = text_of(value, "request_id")
    if not 1 <= len(id) <= MAX_ID:
        message = f"request_id must have 1 to {MAX_ID} characters, got {len(id)}"
        raise ClientError("invalid_value", message, param="request_id")
    return id


def check_model(value: object, model: str) -> None:
    """Raise ClientError for a model other than this one; null stands for this one."""
    if value is None:
        return
    if text_of(value, "model") != model:
        message = f"model {value!r:.120} not found; this server serves {model!r}"
        raise ClientError("model_not_found", message, param="model")


def _include_usage(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise ClientError("invalid_value", "stream_options is for stream=true only", param="stream_options")
    fields = known_fields(options, ("include_usage", *_STREAM_FIXED), "stream_options")
    check_fixed(fields, _STREAM_FIXED, "stream_options")
    return flag_of(fields.get("include_usage"), "stream_options.include_usage")


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    given = {name: value for name, value in fields.items() if name in _SAMPLING}
    if {"max_tokens", "max_completion_tokens"} <= given.keys():
        message = "max_completion_tokens and max_tokens are the same: give one of them"
        raise ClientError("invalid_value", message, param="max_completion_tokens")
    if flag_of(fields.get("logprobs"), "logprobs"):
        given.setdefault("top_logprobs", 0)
    elif "top_logprobs" in given:
        raise ClientError("invalid_value", "top_logprobs needs logprobs=true", param="top_logprobs")
    return sampling_params(given, _SAMPLING)


# ---- messages ------------------------------------------------------------------------------------------------------


def image_refusal(engine: Engine, model: str) -> str:
    """Return the reason why the engine takes no images, with the model's served name; empty if it takes images.

    It is also empty while the model is not loaded: then the engine refuses the request.
    """
    try:
        return as_served(engine.tokenizer.image_refusal, engine.config.model, model)
    except EngineOverloaded:
        return ""


def parse_messages(value: object, refusal: str) -> list[dict[str, Any]]:
    """Parse messages. A content becomes one string, or a list of parts if it has images, whose URLs stay.

    Raises ClientError or RequestRejected; for images with the message `refusal` unless that is empty.
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
    known_fields(fields, _MESSAGE_FIELDS, where)
    check_fixed(fields, _MESSAGE_FIXED, where)
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
