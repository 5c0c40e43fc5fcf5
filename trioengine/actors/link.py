"""The link to one worker incarnation: an outbox, one task that writes, one that reads. Nobody else touches the pipe.

Posting is synchronous: it cannot be cancelled half-way, and needs nothing awaited in a dying scope. The writer is a
service that outlives the sessions, so what was posted is written. A new incarnation has a new link, so nothing that
was posted for a dead worker can reach the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trioengine.actors.ports import WorkerProcess
from trioengine.core.connection import Connection, Role
from trioengine.core.messages import AddMessage, Message
from trioengine.core.power_order import Answer, Change

READ_SIZE = 1 << 16


class Link:
    """Messages to and from one worker incarnation."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.connection = Connection(Role.ENGINE)
        self._outbox: list[bytes] = []
        self._posted = trio.Event()
        self._answer: Answer | None = None
        self._answered = trio.Event()

    def post(self, message: Message, payload: bytes | None = None) -> None:
        """Queue a message. Raises LocalProtocolError, FrameTooLarge among them, and changes nothing then.

        `payload` is what `encode` gave for it; who asked that first meets no FrameTooLarge here.
        """
        self._outbox.append(self.connection.send(message, payload))
        self._posted.set()

    def encode(self, message: AddMessage) -> bytes:
        """Raises FrameTooLarge if `post` would, whatever the order of messages says."""
        return self.connection.encode(message)

    async def ask(self, change: Change) -> Answer | None:
        """Post it and wait for the answer; None when the worker is lost. One at a time; cancelled, it stays posted."""
        self.post(change)
        self._answer, self._answered = None, trio.Event()
        await self._answered.wait()
        return self._answer

    def answer(self, message: Answer) -> None:
        """What was asked is done, or has failed."""
        self._answer = message
        self._answered.set()

    def lose(self) -> None:
        """The worker is dead: nothing will be answered."""
        self._answered.set()

    async def write(self) -> None:
        """Service: write what is posted, until cancelled or the worker no longer reads."""
        while True:
            await self._posted.wait()
            self._posted = trio.Event()
            batch, self._outbox = b"".join(self._outbox), []
            try:
                await self.process.send_stream.send_all(batch)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the worker is dead or about to be; the supervisor learns it by the pidfd

    async def read(self, route: Callable[[Message], None]) -> None:
        """Service: hand every message to `route` until the end of the stream. Raises RemoteProtocolError."""
        while True:
            try:
                data = await self.process.receive_stream.receive_some(READ_SIZE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            self.connection.receive_data(data)
            while (message := self.connection.next_message()) is not None:
                route(message)
