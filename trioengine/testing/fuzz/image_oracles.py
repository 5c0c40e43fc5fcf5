"""Whether a request that fails for an image has one that it must fail for."""

from __future__ import annotations

import re

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.images import payload_of
from trioengine.actors.session import Session
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.testing.fuzz.pictures import UNREADABLE, Content, Turn, num_bytes, pictures_in

_IN_THE_HISTORY = re.compile(r"history\[(\d+)\]\.content\[(\d+)\]")


def check_dropped(error: EngineError, session: Session) -> None:
    """Right after a refusal: the image that it names was dropped."""
    if not isinstance(error, RequestRejected) or error.code != "image_dropped":
        return
    found = _IN_THE_HISTORY.fullmatch(error.param or "")
    assert found, f"only what is kept is dropped: {error!r} of {error.param}"
    message, part = map(int, found.groups())
    payload = payload_of(session.history[message]["content"][part]["image"])
    assert payload.is_dropped, f"{payload} is there, and {error!r}"


def is_refused_for_an_image(error: RequestRejected, content: Content, engine: Engine) -> bool:
    """Whether the error is one of images, which it then must be: of a request that was not entered."""
    match error.code:
        case "image_dropped":  # judged where it was raised
            return True
        case "too_large":
            budget = engine.payloads
            size, count = num_bytes(content), len(pictures_in(content))
            assert size > budget.max_bytes or count > budget.max_count, f"{count} images, {size} bytes, and {error!r}"
            return True
    return False


def check_failed_image(error: RequestRejected, generation: Generation, turns: tuple[Turn, ...]) -> bool:
    """Whether a request with this prompt, which was entered, had to fail with the error of an image."""
    match error.code:
        case "invalid_image":
            return any(UNREADABLE in pictures_in(content) for _, content in turns)
        case "image_dropped":
            assert generation.prepared is not None, "it was committed"
            return any(payload_of(placed.image).is_dropped for placed in generation.prepared.images)
    return False
