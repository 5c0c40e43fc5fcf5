"""Events on their way to the server: in order, and so few unanswered that it never has more than it takes."""

from __future__ import annotations

from collections import deque

from trioengine.aio.nursery import Notifier
from trioengine.client.websocket import WebSocket

WINDOW = 32  # a server closes the connection at 64


class Posts:
    """`put` is synchronous, one task sends."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[str, str | None]] = deque()
        self._unanswered: set[str] = set()
        self._changes = Notifier()

    def put(self, text: str, awaited: str | None = None) -> None:
        """Send this; `awaited` is the event's id if `answered` will be called with it."""
        self._unsent.append((text, awaited))
        self._changes.notify()

    def answered(self, event_id: object) -> None:
        """The server is done with this event; any other id is ignored."""
        if event_id in self._unanswered:
            self._unanswered.remove(str(event_id))
            self._changes.notify()

    async def send_to(self, websocket: WebSocket) -> None:
        """Send until cancelled."""
        while True:
            while not self._unsent or len(self._unanswered) >= WINDOW:
                await self._changes.wait()
            text, awaited = self._unsent.popleft()
            if awaited is not None:
                self._unanswered.add(awaited)
            websocket.send(text)
