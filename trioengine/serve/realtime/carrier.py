"""The carrier of a session: one WebSocket, on which a task each receives, sends and pings.

The tasks that send and ping go on during the close, so that the last events are followed by a clean close.
"""

from __future__ import annotations

from typing import Protocol

import trio
from trio_websocket import ConnectionClosed

from trioengine.serve.realtime.inbox import Flood, Inbox
from trioengine.serve.realtime.outbox import Outbox
from trioengine.serve.websocket import AcceptedWebSocket

CLOSE_TIMEOUT = 5.0  # seconds for the client to answer our close
NORMAL = 1000


class Carried(Protocol):
    """The session as its carrier sees it. The methods are called in the step of the event, and do not wait."""

    def lose(self, carrier: Carrier, code: int | None = None) -> None:
        """The WebSocket was closed with this code; None: the client does not answer or read."""

    def flood(self, carrier: Carrier, reason: str) -> None:
        """The client sends more than is handled."""


class Carrier:
    """Carries a session over one WebSocket until `close`, or until the client is lost."""

    def __init__(
        self, session: Carried, websocket: AcceptedWebSocket, inbox: Inbox, outbox: Outbox, ping_interval: float
    ) -> None:
        self._session = session
        self._websocket = websocket
        self._inbox = inbox
        self._outbox = outbox
        self._ping_interval = ping_interval
        self._code, self._reason = NORMAL, ""
        self._closing = trio.Event()
        self.closed = trio.Event()

    def close(self, code: int, reason: str) -> None:
        """Close the WebSocket with the first code and reason that are given."""
        if not self._closing.is_set():
            self._code, self._reason = code, reason
        self._closing.set()

    async def run(self) -> None:
        """Return once the WebSocket is closed. Raises TooSlowError for a client that does not answer or read."""
        try:
            await self._run()
        finally:
            self.closed.set()

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            nursery.start_soon(self._ping)
            async with trio.open_nursery() as receiving:
                receiving.start_soon(self._receive)
                await self._closing.wait()
                receiving.cancel_scope.cancel()
            with trio.move_on_after(CLOSE_TIMEOUT):
                await self._websocket.aclose(self._code, self._reason)
            nursery.cancel_scope.cancel()

    async def _receive(self) -> None:
        try:
            await self._inbox.receive_from(self._websocket)
        except Flood as exc:
            self._session.flood(self, str(exc))
        except ConnectionClosed as exc:
            self._session.lose(self, None if exc.reason is None else exc.reason.code)
            self.close(NORMAL, "")

    async def _send(self) -> None:
        if self._closing.is_set():  # another has taken over already
            return
        try:
            await self._outbox.send_to(self._websocket)
        except trio.TooSlowError:
            self._session.lose(self)
            raise

    async def _ping(self) -> None:
        """Detect a client that does not answer, even while closing. Raises TooSlowError."""
        while True:
            await trio.sleep(self._ping_interval)
            with trio.move_on_after(self._ping_interval) as scope:
                try:
                    await self._websocket.ping()
                except ConnectionClosed:
                    await trio.sleep_forever()  # until the close is over, which cancels this
            if scope.cancelled_caught:
                self._session.lose(self)
                raise trio.TooSlowError
