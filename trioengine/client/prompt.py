"""A program's prompt and parameters, as the items and fields of the Realtime protocol."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from trioengine.actors.media import file_size, unreadable
from trioengine.core.checks import check_role, content_of, kind_of
from trioengine.core.errors import RequestRejected
from trioengine.core.image import VISION_MODEL, BytesLike, image_url
from trioengine.core.image_header import check_size, read_header
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.core.tools import AskedTools, checked_calls
from trioengine.core.wording import brief

Message: TypeAlias = dict[str, Any]  # role and content, a text, or a list of parts with images; tools' calls, or an id

MAX_EVENT = 1 << 20  # bytes that the server takes
MAX_TOOLS = MAX_EVENT - (1 << 15)  # bytes of tools, beside the other fields of a response
MAX_IMAGE_EVENT = 32 << 20  # where its model takes images
_TRUNCATION: Mapping[Overflow, str] = {"refuse": "disabled", "drop_oldest_turns": "auto"}
_TOOL = "tool"
_MORE_KEYS = {_TOOL: "tool_call_id", "assistant": "tool_calls"}  # of messages, by their roles
_PART_TYPES = {"system": "input_text", "user": "input_text", "assistant": "output_text"}


def chat_messages(prompt: object, name: str, media: Sequence[Media] = ()) -> list[Message]:
    """A user message, or chat messages in OpenAI's shape, the last of which begins with these images.

    Raises RequestRejected for prompts that cannot be sent.
    """
    images = media_parts(media)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt or images else []
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        raise _invalid(name, f"must be a string or messages, got {kind_of(prompt)}")
    if not prompt and name == "prompt":
        raise RequestRejected("empty_prompt", "prompt is empty", param=name)
    messages = [_message(entry, f"{name}[{index}]") for index, entry in enumerate(prompt)]
    if images:
        content = messages[-1]["content"]
        messages[-1]["content"] = [*images, *([_text(content)] if isinstance(content, str) else content)]
    for index, message in enumerate(messages):
        if message["role"] == _TOOL and not isinstance(message["content"], str):
            raise _invalid(f"{name}[{index}].content", "cannot be sent: the output of a call has no images")
    return messages


def _message(entry: object, name: str) -> Message:
    if not isinstance(entry, Mapping):
        raise _invalid(name, f"must be a message (token ids cannot be sent), got {type(entry).__name__}")
    check_role(name, entry, [*_PART_TYPES, _TOOL])
    role, more = entry["role"], _MORE_KEYS.get(entry["role"], "")
    for key in entry:
        if key not in ("role", "content", more):
            raise _invalid(f"{name}.{key!s:.40}", "cannot be sent: a message has role and content")
    message = {"role": role, "content": _content(content_of(name, entry), f"{name}.content")}
    if role == _TOOL:
        return {**message, more: _call_id(entry.get(more), f"{name}.{more}")}
    calls = checked_calls(entry[more], f"{name}.{more}") if entry.get(more) else ()
    return {**message, more: [call.to_json() for call in calls]} if calls else message


def _call_id(id: object, name: str) -> str:
    if not isinstance(id, str) or not id:
        raise _invalid(name, f"must be the id of the call that has this output, got {brief(id)}")
    return id


def _content(content: object, name: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray, memoryview)):
        raise _invalid(name, f"must be a string or a list of parts, got {brief(content)}")
    parts = [_part(part, f"{name}[{index}]") for index, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join([part["text"] for part in parts])


def _part(part: object, name: str) -> dict[str, Any]:
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return _text(part["text"])
        if part.get("type") == "image" and "image" in part:
            return image_part(part["image"], name)
        if (url := image_url(part, name)) is not None:
            return {"type": "image_url", "image_url": {"url": url}}
    raise _invalid(name, "must be a text part or an image part")


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def items_of(message: Message, mint: Callable[[], str]) -> list[dict[str, Any]]:
    """The items of a message, each for a conversation.item.create: calls are items of their own."""
    if message["role"] == _TOOL:
        output = {"call_id": message["tool_call_id"], "output": message["content"]}
        return [{"id": mint(), "type": "function_call_output", **output}]
    calls = message.get("tool_calls", ())
    items = [_message_item(message, mint())] if message["content"] or not calls else []
    called = [{"id": mint(), "type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    return [*items, *called]


def _message_item(message: Message, id: str) -> dict[str, Any]:
    kind, content = _PART_TYPES[message["role"]], message["content"]
    parts: list[dict[str, Any]] = [_text(content)] if isinstance(content, str) else content
    shown = [
        {"type": kind, "text": part["text"]} if part["type"] == "text" else _image_of(part["image_url"]["url"])
        for part in parts
    ]
    return {"id": id, "type": "message", "role": message["role"], "content": shown}


def _image_of(url: str) -> dict[str, str]:
    return {"type": "input_image", "image_url": url}


def response_fields(params: SamplingParams, overflow: Overflow, tools: AskedTools | None) -> dict[str, Any]:
    """The fields of a response.create: the policy, the tools, and the parameters that are not at their defaults.

    Raises RequestRejected for logprobs, of the answer or the prompt, and a grammar.
    """
    for name in ("logprobs", "prompt_logprobs", "grammar"):
        if getattr(params, name) is not None:
            raise RequestRejected("unsupported_parameter", f"{name} cannot be sent over a connection", param=name)
    changed = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != getattr(_DEFAULTS, field.name)
    }
    if "max_tokens" in changed:
        changed["max_output_tokens"] = changed.pop("max_tokens")
    return {**changed, "truncation": _TRUNCATION[overflow], **({} if tools is None else _tool_fields(tools))}


def _tool_fields(tools: AskedTools) -> dict[str, Any]:
    choice: Any = "required" if tools.is_forced else "auto"
    return {
        "tools": [{"type": "function", **function.to_json()} for function in tools.functions],
        "tool_choice": choice if tools.chosen is None else {"type": "function", "name": tools.chosen},
        "parallel_tool_calls": not tools.is_single,
    }


def check_sizes(events: Iterable[str], *, takes_images: bool) -> None:
    """Raise RequestRejected for events that are too large for a server whose model takes no images."""
    if not takes_images and any(len(text) > MAX_EVENT for text in events):
        message = f"prompt: the server's model takes no images; {VISION_MODEL} does"
        raise RequestRejected("images_not_supported", message, param="prompt")


def check_tools_size(fields: Mapping[str, Any]) -> None:
    """Raise RequestRejected for tools that make the event of a response larger than the server takes."""
    size = len(json.dumps(fields.get("tools", ())))
    if size > MAX_TOOLS:
        message = f"tools: {size} bytes of JSON are too large, the limit is {MAX_TOOLS}"
        raise RequestRejected("too_large", message, param="tools")


def rendered(name: str, event_id: str, fields: Mapping[str, Any], limit: int = MAX_EVENT) -> str:
    """The JSON of an event. Raises RequestRejected if it is larger than the server takes."""
    text = json.dumps({"type": name, "event_id": event_id, **fields})
    if len(text) > limit:  # JSON in ASCII
        message = f"prompt: a message of {len(text)} bytes of JSON is too large, the limit is {limit}"
        raise RequestRejected("too_large", message, param="prompt")
    return text


def _invalid(name: str, problem: str) -> RequestRejected:
    return RequestRejected("invalid_value", f"{name} {problem}", param=name)


_DEFAULTS = SamplingParams()


LONG = 1 << 20  # bytes of images; more are read and encoded in a thread


class SavedImage(Protocol):
    """An image with a method that writes it as a file, such as a PIL.Image.Image."""

    @property
    def size(self) -> tuple[int, int]: ...
    def save(self, fp: io.BytesIO, format: str) -> object: ...


Media: TypeAlias = BytesLike | str | Path | SavedImage


def media_parts(media: Sequence[Media]) -> list[dict[str, Any]]:
    """These images as parts of a message. Reads files. Raises RequestRejected for invalid images, with the place."""
    if not isinstance(media, Sequence) or isinstance(media, (str, bytes, bytearray, memoryview)):
        raise RequestRejected("invalid_value", f"media must be a list, got {type(media).__name__}", param="media")
    return [image_part(image, f"media[{index}]") for index, image in enumerate(media)]


def image_part(media: Media, where: str) -> dict[str, Any]:
    """One image as a part of a message, with a data URL."""
    data = memoryview(_encoded(media, where)).cast("B")
    format = read_header(data, where=where).format
    url = f"data:image/{format};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def is_long(media: Sequence[Media]) -> bool:
    """Whether to encode these images in a thread: they are large, or invalid."""
    try:
        return sum(map(_size, media)) > LONG
    except (OSError, TypeError, ValueError):
        return True


def _size(media: Media) -> int:
    """The approximate size in bytes."""
    if isinstance(media, bytes | bytearray | memoryview):
        return memoryview(media).nbytes
    if isinstance(media, str | Path):
        return Path(media).stat().st_size
    if not hasattr(media, "size"):
        return 0
    width, height = media.size
    return int(width) * int(height) * 3


def _encoded(media: Media, where: str) -> BytesLike:
    if isinstance(media, bytes | bytearray | memoryview):
        return media
    if isinstance(media, str | Path):
        return _read(Path(media), where)
    if not (hasattr(media, "save") and hasattr(media, "size")):
        rule = "must be bytes, a path, or an image with a method `save`, as PIL's have"
        raise RequestRejected("invalid_value", f"{where}: {rule}, got {type(media).__name__}", param=where)
    check_size(*media.size, where=where)
    file = io.BytesIO()
    media.save(file, format="PNG")
    return file.getvalue()


def _read(path: Path, where: str) -> bytes:
    file_size(path, where)
    try:
        return path.read_bytes()
    except OSError as exc:
        raise unreadable(path, where, exc) from exc


def has_images(message: Mapping[str, Any]) -> bool:
    """Whether the message has images."""
    return not isinstance(message["content"], str)
