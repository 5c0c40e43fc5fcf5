"""An accepted connection as a WebSocket: trio-websocket's, tolerating clients that violate RFC 6455.

trio-websocket reads and writes by way of a wsproto connection, in whose place WebSocketProtocol stands. Its private
names that AcceptedWebSocket needs are used in this file only, and listed in tests/serve/test_websocket_frames.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Self

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Pong, TextMessage

from trioengine.serve.errors import OverBudget
from trioengine.serve.limits import ALWAYS_TAKEN, Held

READ_SIZE = 8 << 10  # bytes; those read at once are handled at once, and may be a thousand frames
_NOT_UTF8 = 1007
_VIOLATIONS = {_NOT_UTF8: "a text message is not UTF-8"}  # by the code of the close
_VIOLATION = "the frames break the rules of RFC 6455"


class AcceptedWebSocket(WebSocketConnection):
    """The server's end of a WebSocket. It leaves its stream open: the owner closes it once the client has read all.

    `lingering` is entered for the time of a close by the server.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        max_message_size: Callable[[], int],
        held: Held,
        lingering: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.lingering = lingering
        self.max_message_size = max_message_size  # bytes; called for each message, as it grows once the model is known
        self._protocol = WebSocketProtocol(max_message_size, held)
        super().__init__(
            KeptOpen(stream),
            self._protocol,
            message_queue_size=1,
            max_message_size=max_message_size(),
            receive_buffer_size=READ_SIZE,
        )

    def receive_handshake(self, seen: bytes) -> None:
        """Take the bytes of a handshake. Raises wsproto's ProtocolError, or UnicodeError, if they are malformed."""
        self._protocol.receive_data(seen)

    async def open(self, nursery: trio.Nursery) -> WebSocketRequest:
        """Return the client's proposal, after `receive_handshake`; further frames are read in this nursery."""
        nursery.start_soon(self._reader_task)
        return await self._get_request()

    async def get_message(self) -> str | bytes:
        """Return the next message. Raises OverBudget in place of one that was not kept, and ConnectionClosed."""
        message = await super().get_message()
        if isinstance(message, RefusedText):
            raise message.refusal
        return message

    async def send(self, messages: Sequence[TextMessage]) -> None:
        """Send messages, or parts of one, in one write; between parts only pings and pongs may be sent.

        Raises ConnectionClosed.
        """
        if self.closed is not None:
            raise ConnectionClosed(self.closed)
        await self._send(TextMessages(messages))

    async def aclose(self, code: int = 1000, reason: str | None = None) -> None:
        """Send a close, and wait for the client's. Raises Displaced if the connection has to make room meanwhile."""
        with self.lingering():
            await super().aclose(code, reason)

    async def _handle_message_event(self, event: TextMessage | BytesMessage) -> None:
        self._max_message_size = self.max_message_size()
        if isinstance(event.data, RefusedText):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._send_channel.send(event.data)
        else:
            await super()._handle_message_event(event)
            object.__setattr__(event, "data", type(event.data)())  # trio-websocket keeps the event until the next one


class KeptOpen(trio.abc.Stream):
    """A stream that `aclose` leaves open."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass(frozen=True)
class TextMessages(Event):
    """Several messages, or parts of one, whose bytes are written together."""

    messages: Sequence[TextMessage]


class RefusedText(str):
    """Stands for a message that was not kept because its bytes were over the budget."""

    refusal: OverBudget

    def __new__(cls, refusal: OverBudget) -> Self:
        text = super().__new__(cls)
        text.refusal = refusal
        return text


class WebSocketProtocol(WSConnection):
    """wsproto's connection, for trio-websocket, with whole messages and a budget for their bytes.

    Messages come whole, however many fragments they are sent in, or cut once they are longer than `max_message_size()`
    bytes. The bytes of an unfinished message are taken of `held`; beyond the budget a RefusedText comes in its place.
    A client that violates RFC 6455 is sent a close, and nothing after it.
    """

    def __init__(self, max_message_size: Callable[[], int], held: Held) -> None:
        super().__init__(ConnectionType.SERVER)
        self._held = held
        self._refusal: OverBudget | None = None  # of the unfinished message
        self._max_message_size = max_message_size
        self._parts = io.BytesIO()  # of the unfinished message; a text's as UTF-8
        self._size = 0  # of these, in bytes
        self._is_violated = False

    @property
    def state(self) -> ConnectionState:
        """A violation is answered like a close of the client's."""
        state = super().state
        return ConnectionState.REMOTE_CLOSING if self._is_violated and state is ConnectionState.OPEN else state

    def send(self, event: Event) -> bytes:
        """Return the bytes of an event; none of a pong, or of a second close, once we have sent a close."""
        if isinstance(event, Pong | CloseConnection) and self.state is ConnectionState.LOCAL_CLOSING:
            return b""
        if isinstance(event, TextMessages):
            return b"".join(map(super().send, event.messages))
        return super().send(event)

    def events(self) -> Generator[Event, None, None]:
        """Yield the events in the bytes received."""
        for event in super().events():
            if isinstance(event, TextMessage | BytesMessage):
                yield from self._collect(event)
            elif isinstance(event, CloseConnection) and super().state is ConnectionState.OPEN:
                self._is_violated = True
                yield CloseConnection(code=event.code, reason=_VIOLATIONS.get(event.code, _VIOLATION))
            else:
                yield event

    def _collect(self, event: TextMessage | BytesMessage) -> Generator[Event, None, None]:
        """Yield the message that this part finishes, or makes too long.

        A text that is too long comes as bytes: of a text trio-websocket would count the characters.
        """
        part = event.data.encode() if isinstance(event, TextMessage) else event.data
        self._size += len(part)
        is_too_large = self._size > self._max_message_size() and self._refusal is None
        if event.message_finished and self._size == len(part):
            self._size = 0
            yield BytesMessage(data=part) if is_too_large else event
            return
        self._add(part)
        if event.message_finished or is_too_large:
            whole, refusal = self._parts.getvalue(), self._refusal
            self._drop_parts()
            self._size, self._refusal = 0, None
            if refusal is not None:
                yield TextMessage(data=RefusedText(refusal))
            elif isinstance(event, TextMessage) and not is_too_large:
                yield TextMessage(data=whole.decode())
            else:
                yield BytesMessage(data=whole)

    def _add(self, part: bytes | bytearray) -> None:
        """Keep a part of the message; drop all of it, and the parts to come, if it is over the budget."""
        if self._refusal is not None:
            return
        try:
            if self._parts.tell() + len(part) > ALWAYS_TAKEN:
                self._held.check_room(len(part))
        except OverBudget as exc:
            self._refusal = exc
            self._drop_parts()
        else:
            self._held.charge(len(part))
            self._parts.write(part)

    def _drop_parts(self) -> None:
        self._held.give_back(self._parts.tell())
        self._parts = io.BytesIO()
