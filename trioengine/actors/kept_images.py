"""Images that are kept for later requests by their owner, beside the sessions that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from trioengine.actors.images import payload_of
from trioengine.text.chat_tokenizer import image_parts


class KeptImages:
    """Chat messages, and a hold on the images in them; leaving its `with` block, or `release`, gives that back.

    Held images are kept as long as there is room for them, and a request whose image was dropped is refused.
    """

    __slots__ = ("_payloads", "messages")

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises RequestRejected for an Image that no engine has made."""
        self.messages = messages
        found = image_parts(message for message in messages if isinstance(message, Mapping))
        self._payloads = [payload_of(part.image) for part in found]
        for payload in self._payloads:
            payload.hold()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Hold them no more; harmless when they were released."""
        payloads, self._payloads = self._payloads, []
        for payload in payloads:
            payload.release()
