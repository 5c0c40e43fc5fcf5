"""The images in a prompt: found, taken out as sources, and put back as payloads. A message never holds their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trioengine.actors.media import ImageSource, Media, source_of, source_of_url
from trioengine.actors.payload import Payload
from trioengine.core.errors import RequestRejected
from trioengine.core.image import Image, image_url, is_image_part

T = TypeVar("T")
_URL_FIELDS = {"image_url": "image_url.url", "input_image": "image_url"}  # by the part's type
_PLAIN = (str, bytes, bytearray, memoryview)  # sequences, but not of messages or of parts


def take_images(
    prompt: Any, media: Sequence[Media] = (), *, max_bytes: int, where: str = "prompt"
) -> tuple[Any, list[ImageSource]]:
    """The prompt with a source in the place of each image that has no payload yet, and these sources.

    `media` go before the text of the last message. `max_bytes` bounds each image of a client. Raises RequestRejected
    for what cannot be an image.
    """
    if not isinstance(media, Sequence) or isinstance(media, _PLAIN):
        raise RequestRejected("invalid_value", f"media must be a list, got {type(media).__name__}", param="media")
    if media:
        prompt = _with_media(prompt, [{"type": "image", "image": image} for image in media])
    sources: list[ImageSource] = []

    def take(part: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        source = _source_of(part, max_bytes, where)
        if source is None:
            return part
        sources.append(source)
        return {"type": "image", "image": source}

    return _mapped(prompt, where, take), sources


def put_images(prompt: Any, payloads: Sequence[Payload]) -> Any:
    """What `take_images` gave, with an image part for each payload where its source was."""
    rest = iter(payloads)

    def put(part: Mapping[str, Any], _: str) -> Mapping[str, Any]:
        if not isinstance(part.get("image"), ImageSource):
            return part
        payload = next(rest)
        return Image(payload.info, payload).part

    return _mapped(prompt, "", put) if payloads else prompt


def _mapped(prompt: Any, where: str, change: Callable[[Mapping[str, Any], str], Mapping[str, Any]]) -> Any:
    """The prompt with every part of a message's content changed; itself where no content has parts."""
    if isinstance(prompt, _PLAIN) or not isinstance(prompt, Sequence):
        return prompt
    changed: dict[int, Mapping[str, Any]] = {}
    for index, message in enumerate(prompt):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, _PLAIN):
            parts = [
                change(part, f"{where}[{index}].content[{number}]") if isinstance(part, Mapping) else part
                for number, part in enumerate(content)
            ]
            changed[index] = {**message, "content": parts}
    return [changed.get(index, message) for index, message in enumerate(prompt)] if changed else prompt


def _source_of(part: Mapping[str, Any], max_bytes: int, where: str) -> ImageSource | None:
    if is_image_part(part):
        return None
    if part.get("type") == "image" and "image" in part:
        return source_of(part["image"], where)
    url = image_url(part, where)
    return None if url is None else source_of_url(url, max_bytes, f"{where}.{_URL_FIELDS[part['type']]}")


def _with_media(prompt: Any, images: list[dict[str, Any]]) -> list[Any]:
    """The prompt as messages, the last of which begins with these images."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, _PLAIN) and prompt
    if not is_chat or not isinstance(prompt[-1], Mapping):
        raise RequestRejected("invalid_value", "media: images need a text or chat messages as prompt", param="media")
    *others, last = prompt
    content = last.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(content, _PLAIN) or not isinstance(content, Sequence):
        return list(prompt)  # it will be refused for this content
    return [*others, {**last, "content": [*images, *content]}]
