"""What a program asks, as the items and the fields that the server is sent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from trioengine.core.arguments import check_role
from trioengine.core.errors import RequestRejected
from trioengine.core.overflow import Overflow
from trioengine.core.sampling_params import SamplingParams

Message: TypeAlias = dict[str, str]  # role and content

MAX_EVENT = 1 << 20  # bytes, of what the server takes
_TRUNCATION: Mapping[Overflow, str] = {"refuse": "disabled", "drop_oldest_turns": "auto"}
_PART_TYPES = {"system": "input_text", "user": "input_text", "assistant": "output_text"}


def chat_messages(prompt: object, name: str) -> list[Message]:
    """A user message, or chat messages in OpenAI's shape. Raises RequestRejected for what cannot be sent."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        raise _invalid(name, f"must be a string or messages, got {type(prompt).__name__}")
    if not prompt and name == "prompt":
        raise RequestRejected("empty_prompt", "prompt is empty", param=name)
    return [_message(entry, f"{name}[{index}]") for index, entry in enumerate(prompt)]


def _message(entry: object, name: str) -> Message:
    if not isinstance(entry, Mapping):
        raise _invalid(name, f"must be a message (token ids cannot be sent), got {type(entry).__name__}")
    check_role(name, entry, _PART_TYPES)
    for key in entry:
        if key not in ("role", "content"):
            raise _invalid(f"{name}.{key!s:.40}", "cannot be sent: a message has role and content")
    return {"role": entry["role"], "content": _content(entry.get("content"), f"{name}.content")}


def _content(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) and not isinstance(content, bytes) else (None,)
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _invalid(name, "must be a string or a list of text parts")
    return "".join(text for text in texts if isinstance(text, str))


def item_of(message: Message, id: str) -> dict[str, Any]:
    """The item of a conversation.item.create."""
    part = {"type": _PART_TYPES[message["role"]], "text": message["content"]}
    return {"id": id, "type": "message", "role": message["role"], "content": [part]}


def response_fields(params: SamplingParams, overflow: Overflow) -> dict[str, Any]:
    """The fields of a response.create: the policy, and the parameters that are not at their defaults.

    Raises RequestRejected for logprobs.
    """
    if params.logprobs is not None:
        raise RequestRejected("unsupported_parameter", "logprobs are not sent over a connection", param="logprobs")
    changed = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != getattr(_DEFAULTS, field.name)
    }
    if "max_tokens" in changed:
        changed["max_output_tokens"] = changed.pop("max_tokens")
    return {**changed, "truncation": _TRUNCATION[overflow]}


def rendered(name: str, event_id: str, fields: Mapping[str, Any]) -> str:
    """An event as it is sent. Raises RequestRejected if the server takes none that is so large."""
    text = json.dumps({"type": name, "event_id": event_id, **fields})
    if len(text) > MAX_EVENT:  # it is ASCII
        message = f"prompt: a message of {len(text)} bytes of JSON is too large, the limit is {MAX_EVENT}"
        raise RequestRejected("too_large", message, param="prompt")
    return text


def _invalid(name: str, problem: str) -> RequestRejected:
    return RequestRejected("invalid_value", f"{name} {problem}", param=name)


_DEFAULTS = SamplingParams()
