"""The images that conversations must keep: those of their items, and of the prompts of responses in progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trioengine.actors.images import payload_of
from trioengine.actors.kept_images import KeptImages
from trioengine.actors.payload import Payload
from trioengine.serve.realtime.connection import RealtimeConnection
from trioengine.serve.realtime.response import ResponseStatus
from trioengine.testing.fuzz.machine import Watch
from trioengine.text.placed_image import image_parts


class ConversationImages:
    """The images of one server's connections, by their items and responses."""

    def __init__(self) -> None:
        self._connections: list[RealtimeConnection] = []  # that are not over

    @property
    def watches(self) -> tuple[Watch, ...]:
        """All that is watched."""
        return ((RealtimeConnection, "run", self.of_connections),)

    def of_connections(self, run: Any) -> Any:
        """For `RealtimeConnection.run`."""

        async def watched(connection: RealtimeConnection) -> None:
            self._connections.append(connection)
            try:
                await run(connection)
            finally:
                self._connections.remove(connection)

        return watched

    def check(self, kept: Iterable[KeptImages]) -> None:
        """After every rule: the kept images are those of conversations, and of responses that are not over.

        A connection that is about to end may have let go of its responses' images.
        """
        found: Counter[Payload] = Counter(payload for each in kept for payload in each._payloads)
        in_items = Counter(self._of_items())
        in_responses = Counter(self._of_responses(self._connections))
        at_least = in_items + Counter(self._of_responses(each for each in self._connections if not each._is_gone))
        assert at_least <= found <= in_items + in_responses, (
            f"kept are {found}, in items are {in_items}, in responses {in_responses}"
        )

    def _of_items(self) -> Iterator[Payload]:
        for connection in self._connections:
            yield from _payloads_in(item.message for item in connection._items._items.values())

    def _of_responses(self, connections: Iterable[RealtimeConnection]) -> Iterator[Payload]:
        for connection in connections:
            for response in connection._active:
                if response.status is ResponseStatus.IN_PROGRESS:
                    yield from _payloads_in(response.spec.messages)


def _payloads_in(messages: Iterable[Mapping[str, Any]]) -> Iterator[Payload]:
    return (payload_of(part.image) for part in image_parts(messages))
