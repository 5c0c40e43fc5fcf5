"""Whether a request that fails for an image has one that it must fail for."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from trioengine.actors.generation import Generation
from trioengine.actors.images import payload_of
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.testing.fuzz.pictures import DAMAGED, GARBAGE, HUGE, UNREADABLE, Content, Turn, has, pictures_of
from trioengine.testing.toy_vision import UNREADABLE as UNREADABLE_BYTES
from trioengine.testing.toy_vision import ToyImage

_IN_THE_HISTORY = re.compile(r"history\[(\d+)\]\.content\[(\d+)\]")
_REFUSALS = {  # codes, and the pictures that they are for
    "too_large": HUGE,
    "image_parse_error": DAMAGED,
    "invalid_image_format": GARBAGE,
}


def check_dropped(error: EngineError, session: Session) -> None:
    """Right after a refusal: the image that it names was dropped."""
    if not isinstance(error, RequestRejected) or error.code != "image_dropped":
        return
    found = _IN_THE_HISTORY.fullmatch(error.param or "")
    assert found, f"only what is kept is dropped: {error!r} of {error.param}"
    message, part = map(int, found.groups())
    payload = payload_of(session.history[message]["content"][part]["image"])
    assert payload.is_dropped, f"{payload} is there, and {error!r}"


def is_refused(code: str, content: Content) -> bool:
    """Whether a prompt with this content is refused with this code, before it comes to the worker."""
    return code in _REFUSALS and has(content, _REFUSALS[code])


def is_failed(code: str, turns: Iterable[Turn], dropped: Container[bytes]) -> bool:
    """Whether a request with these turns fails with this code; `dropped` are the bytes of images that are not kept."""
    contents = [content for _, content in turns]
    if code == "image_dropped":
        return any(picture.data in dropped for content in contents for picture in pictures_of(content))
    return code == "invalid_image" and any(has(content, UNREADABLE) for content in contents)


def check_seen(images: Iterable[ToyImage]) -> None:
    """There is an answer to these images: the worker could read each of them."""
    assert not any(data[:1] == UNREADABLE_BYTES for _, data in images), "it is answered, and an image cannot be read"


def check_failed_image(error: RequestRejected, generation: Generation, turns: tuple[Turn, ...]) -> bool:
    """Whether a request with this prompt, which was entered, had to fail with the error of an image."""
    if error.code == "image_dropped":
        assert generation.prepared is not None, "it was committed"
        return any(payload_of(placed.image).is_dropped for placed in generation.prepared.images)
    return is_failed(error.code, turns, ())
