"""The link to one worker incarnation: an outbox, one task that writes, one that reads, one that passes payloads.

Nothing else touches the pipes and the payload socket.

Posting is synchronous: it cannot be cancelled half-way, and needs nothing awaited in a dying scope. The writer is a
service that outlives the sessions, so posted messages are written. A new incarnation has a new link, so nothing that
was posted for a dead worker can reach the next one.

A payload is pinned from the step that hands it over until the worker has consumed it, or is lost. The link keeps these
by id, and so gives each of them back once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import trio

from trioengine.actors.payload import Payload
from trioengine.actors.ports import WorkerProcess
from trioengine.aio.pipes import READ_SIZE
from trioengine.core.connection import Connection, Role
from trioengine.core.errors import RemoteProtocolError
from trioengine.core.messages import AddMessage, ControlReply, ControlRequest, Message, PayloadConsumed


class Link:
    """Messages to and from one worker incarnation."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.connection = Connection(Role.ENGINE)
        self.end_of_stream = trio.Event()
        self.violation: RemoteProtocolError | None = None  # of the protocol, which ended the reading
        self._outbox: list[bytes] = []
        self._posted = trio.Event()
        self._payloads: dict[int, Payload] = {}  # handed over, and not consumed
        self._unsent: deque[int] = deque()
        self._handed_over = trio.Event()
        self._reply: ControlReply | None = None
        self._replied = trio.Event()

    def post(self, message: Message) -> None:
        """Queue a message. Raises LocalProtocolError, FrameTooLarge included, and changes nothing then."""
        self._outbox.append(self.connection.send(message))
        self._posted.set()

    def post_with(self, message: Message, payloads: Sequence[Payload]) -> None:
        """Post a message, and pass the payloads of its images: each with a pin, which the link gives back."""
        try:
            self.post(message)
        except BaseException:
            for payload in payloads:
                payload.unpin()
            raise
        if isinstance(message, AddMessage):
            for image, payload in zip(message.images, payloads, strict=True):
                self._hand_over(image.payload, payload)

    async def ask(self, change: ControlRequest) -> ControlReply | None:
        """Post it and wait for the reply; None when the worker is lost. One at a time; cancelled, it stays posted."""
        self.post(change)
        self._reply, self._replied = None, trio.Event()
        await self._replied.wait()
        return self._reply

    def on_reply(self, message: ControlReply) -> None:
        """Deliver the worker's reply to `ask`."""
        self._reply = message
        self._replied.set()

    def lose(self) -> None:
        """The worker is dead: nothing will be answered, and no payload consumed."""
        self._replied.set()
        self._unsent.clear()
        while self._payloads:
            self._payloads.popitem()[1].unpin()

    # ---- payloads -------------------------------------------------------------------------------------------------

    @property
    def payloads(self) -> frozenset[int]:
        """The payloads that were handed over and without a PAYLOAD_CONSUMED of the worker so far."""
        return frozenset(self._payloads)

    def _hand_over(self, payload_id: int, payload: Payload) -> None:
        """Pass a pinned payload to the worker, under an id that a message announced in this step."""
        self._payloads[payload_id] = payload
        self._unsent.append(payload_id)
        self._handed_over.set()

    def on_consumed(self, message: PayloadConsumed) -> None:
        """The worker has closed a payload. Raises RemoteProtocolError if that was not passed to it yet."""
        if message.payload in self._unsent:
            raise RemoteProtocolError(f"PAYLOAD_CONSUMED: payload {message.payload} was not passed yet")
        self._payloads.pop(message.payload).unpin()

    async def send_payloads(self) -> None:
        """Service: pass payloads to the worker, until cancelled. Raises BrokenResourceError or ClosedResourceError."""
        while True:
            await self._handed_over.wait()
            self._handed_over = trio.Event()
            while self._unsent:
                payload_id = self._unsent[0]
                await self.process.send_payload(payload_id, self._payloads[payload_id].sealed)
                self._unsent.popleft()

    # ---- services -------------------------------------------------------------------------------------------------

    async def write(self) -> None:
        """Service: write the posted messages, until cancelled or the worker no longer reads."""
        while True:
            await self._posted.wait()
            self._posted = trio.Event()
            batch, self._outbox = b"".join(self._outbox), []
            try:
                await self.process.send_stream.send_all(batch)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the worker is dead or about to be; the supervisor learns it by the pidfd

    async def read(self, dispatch: Callable[[Message], None]) -> None:
        """Service: hand every message to `dispatch` until the end of the stream, or a violation of the protocol."""
        try:
            while data := await self.process.receive_stream.receive_some(READ_SIZE):
                self.connection.receive_data(data)
                while (message := self.connection.next_message()) is not None:
                    dispatch(message)
        except RemoteProtocolError as exc:
            self.violation = exc
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the stream has ended
        self.end_of_stream.set()
