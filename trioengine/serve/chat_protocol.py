"""The protocol of a chat completion: parse its request, and render its response, whole or as the frames of a stream.

Each field of a request is supported, ignored without harm, or refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii  # json.dumps of a string, without its set-up
from typing import Any

from trioengine.actors.engine import Engine
from trioengine.core.errors import EngineOverloaded
from trioengine.core.image import image_url
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Chunk, Completion, Logprobs, Usage
from trioengine.serve.errors import ClientError, Problem
from trioengine.serve.ids import new_id, unix_time
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
from trioengine.text.tokenizer import Tokenizer

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


# ---- responses -----------------------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LEAST = -9999.0  # stands for minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The fields common to all parts of one completion; `top_logprobs` is None without log-probabilities."""

    model: str
    tokenizer: Tokenizer
    top_logprobs: int | None
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=unix_time)

    def whole(self, completion: Completion) -> bytes:
        """Render a chat.completion."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self.logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason.value,
        }
        shown = {**self.head("chat.completion"), "choices": [choice], "usage": usage_json(completion.usage)}
        return json.dumps(shown).encode()

    def head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def logprobs(self, logprobs: Iterable[Logprobs] | None) -> dict[str, Any] | None:
        if self.top_logprobs is None:
            return None
        return {"content": logprobs_content(logprobs or (), self.top_logprobs, self.tokenizer), "refusal": None}


class ChatFrames:
    """Renders the frames of one stream; the parts that they have in common are rendered once."""

    __slots__ = (
        "_after",
        "_before",
        "_include_usage",
        "_shape",
        "_text_after",
        "_text_before",
        "_usage_before",
        "opening",
    )

    def __init__(self, shape: ChatShape, *, include_usage: bool) -> None:
        self._shape = shape
        self._include_usage = include_usage
        head = json.dumps(shape.head("chat.completion.chunk"))[:-1]
        self._before = f'data: {head}, "choices": [{{"index": 0, "delta": '.encode()
        self._usage_before = f'data: {head}, "choices": [], "usage": '.encode()
        self._after = b'], "usage": null}\n\n' if include_usage else b"]}\n\n"
        self._text_before = self._before + b'{"content": '
        self._text_after = b'}, "logprobs": null, "finish_reason": null}' + self._after
        self.opening = self._frame('{"role": "assistant", "content": ""}')

    def delta(self, chunk: Chunk) -> bytes:
        """Render a chunk; b"" for one without text and log-probabilities."""
        if not chunk.logprobs:
            return self.text(chunk.text)
        delta = json.dumps({"content": chunk.text})
        return self._frame(delta, logprobs=json.dumps(self._shape.logprobs(chunk.logprobs)))

    def text(self, text: str) -> bytes:
        """Render a text without log-probabilities; b"" for an empty one."""
        return self._text_before + encode_basestring_ascii(text).encode() + self._text_after if text else b""

    def end(self, completion: Completion) -> bytes:
        """Render the finish reason, the usage if requested, and the end of the stream."""
        usage = b""
        if self._include_usage:
            usage = self._usage_before + json.dumps(usage_json(completion.usage)).encode() + b"}\n\n"
        return self._frame("{}", finish_reason=f'"{completion.finish_reason.value}"') + usage + DONE

    def _frame(self, delta: str, *, logprobs: str = "null", finish_reason: str = "null") -> bytes:
        """Render an event of fields in JSON."""
        shown = f'{delta}, "logprobs": {logprobs}, "finish_reason": {finish_reason}}}'
        return self._before + shown.encode() + self._after


def error_frames(problem: Problem) -> bytes:
    """Render an error in the middle of a stream, and the end of the stream."""
    return f"data: {json.dumps({'error': problem.to_json()})}\n\n".encode() + DONE


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprobs_content(logprobs: Iterable[Logprobs], top: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Render each token, the end token included, with the `top` best of its position, best first."""
    return [_position(position, top, tokenizer) for position in logprobs]


def _position(position: Logprobs, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    chosen = next(iter(position))
    best = sorted(position, key=position.__getitem__, reverse=True)[:top]
    alternatives = [_token(token_id, position[token_id], tokenizer) for token_id in best]
    return {**_token(chosen, position[chosen], tokenizer), "top_logprobs": alternatives}


def _token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.is_byte_level:
        data = tokenizer.bytes_of((token_id,))
        text = data.decode(errors="replace")
    else:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        data = text.encode()
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}
