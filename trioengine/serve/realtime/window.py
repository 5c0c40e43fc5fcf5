"""The window of a session: the time for which it waits for a client whose connection was lost."""

from __future__ import annotations

from typing import Any

import trio

from trioengine.aio.concurrency import Notifier
from trioengine.serve.ids import new_token
from trioengine.serve.realtime.outbox import Outbox

MAX_SECONDS = 60
MAX_KEPT = 1 << 20  # characters of the events, sent and unsent, that are kept for the client


class Window:
    """Opens at each loss of the client, and closes when it comes back; `token` lets it in."""

    def __init__(self, seconds: float) -> None:
        self.token = new_token()
        self._seconds = seconds
        self._scope: trio.CancelScope | None = None  # of the open window
        self._opened = Notifier()

    def to_json(self) -> dict[str, Any]:
        return {"token": self.token, "seconds": self._seconds}

    def open(self) -> None:
        """Wait for the client from now on."""
        self._scope = trio.CancelScope(deadline=trio.current_time() + self._seconds)
        self._opened.notify()

    def close(self) -> None:
        """Wait no longer: the client is back, and the outbox is about to be read again."""
        self._scope = None

    def cut(self) -> None:
        """Let a window that is open pass at once."""
        if self._scope is not None:
            self._scope.cancel()

    async def passed(self, outbox: Outbox) -> None:
        """Wait until a window passes without the client, by its time, by `cut`, or because the outbox is overfull."""
        while True:
            while (scope := self._scope) is None:
                await self._opened.wait()
            with scope:
                while self._scope is scope and not outbox.is_overfull:
                    await outbox.changed()
            if self._scope is scope:
                return
