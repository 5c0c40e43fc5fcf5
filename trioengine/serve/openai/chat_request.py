"""What a chat completion is asked for: every field is built, or harmless to ignore, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.fields import check_fixed, flag_of, known_fields, metadata_of, text_of
from trioengine.serve.json_object import load_object
from trioengine.serve.openai.messages import parse_messages
from trioengine.serve.problem import ClientError
from trioengine.serve.sampling import SAMPLING, sampling_params

_SAMPLING = {  # OpenAI's names, and ours
    **SAMPLING,
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
_FIXED: Mapping[str, tuple[Any, ...]] = {  # what these may say: nothing else is built
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
_LABELS = ("user", "safety_identifier", "prompt_cache_key")  # for the client's own books, and of no effect here
_OTHERS = ("messages", "model", "logprobs", "stream", "stream_options", "metadata", "request_id")
MAX_ID = 128  # characters
_FIELDS = frozenset({*_SAMPLING, *_FIXED, *_LABELS, *_OTHERS})
_STREAM_FIXED: Mapping[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, checked: what is left of its body."""

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool  # in a stream
    request_id: str | None  # the client's own, for /abort_request


def parse_chat_request(body: bytes, model: str, image_refusal: str) -> ChatRequest:
    """Read the body of a request to the one `model` that there is. Raises ClientError or RequestRejected.

    `image_refusal` is the reason why it takes no images, or empty.
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
    """Raises ClientError for another model than this one; null or absent is this one."""
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
