"""The WebSocket protocol of an accepted connection: wsproto's, also for clients that do not keep to the rules."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Pong, TextMessage

from trioengine.serve.errors import OverBudget
from trioengine.serve.limits import ALWAYS_TAKEN, Held

_NOT_UTF8 = 1007
_OFFENCES = {_NOT_UTF8: "a text message is not UTF-8"}  # by the code of the close
_OFFENCE = "the frames break the rules of RFC 6455"


@dataclass(frozen=True)
class TextMessages(Event):
    """Several, or parts of one, whose bytes go together."""

    messages: Sequence[TextMessage]


class RefusedText(str):
    """In place of a message that was not kept, as there was no room for its bytes."""

    refusal: OverBudget

    def __new__(cls, refusal: OverBudget) -> Self:
        text = super().__new__(cls)
        text.refusal = refusal
        return text


class WebSocketProtocol(WSConnection):
    """What trio-websocket reads and writes, in place of wsproto's own.

    Messages come whole, or as far as they are longer than `max_message_size()` bytes, so that it matters little in how
    many fragments they are sent. The bytes of one that is on its way are taken of `held`; where there is no room for
    them, a RefusedText comes in its place. A client that breaks the rules gets a close, after which nothing is sent.
    """

    def __init__(self, max_message_size: Callable[[], int], held: Held) -> None:
        super().__init__(ConnectionType.SERVER)
        self._held = held
        self._refusal: OverBudget | None = None  # of the message that is on its way
        self._max_message_size = max_message_size  # in bytes, at the moment
        self._parts = io.BytesIO()  # of the message that is on its way; of a text as UTF-8
        self._size = 0  # of these, in bytes
        self._is_offended = False

    @property
    def state(self) -> ConnectionState:
        """An offence ends the connection as the client's own goodbye does: it is answered."""
        state = super().state
        return ConnectionState.REMOTE_CLOSING if self._is_offended and state is ConnectionState.OPEN else state

    def send(self, event: Event) -> bytes:
        """The bytes of an event; none of a pong, or a second close, while ours waits for its answer."""
        if isinstance(event, Pong | CloseConnection) and self.state is ConnectionState.LOCAL_CLOSING:
            return b""
        if isinstance(event, TextMessages):
            return b"".join(map(super().send, event.messages))
        return super().send(event)

    def events(self) -> Generator[Event, None, None]:
        """What the client did."""
        for event in super().events():
            if isinstance(event, TextMessage | BytesMessage):
                yield from self._whole(event)
            elif isinstance(event, CloseConnection) and super().state is ConnectionState.OPEN:
                self._is_offended = True
                yield CloseConnection(code=event.code, reason=_OFFENCES.get(event.code, _OFFENCE))
            else:
                yield event

    def _whole(self, event: TextMessage | BytesMessage) -> Generator[Event, None, None]:
        """The message that ends with this part, if one does, or is too long already.

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
        """Keep a part of the message, or none of it if there is no room for all."""
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


READ_SIZE = 8 << 10  # bytes; what is read at once is handled at once, and may be a thousand frames


class AcceptedWebSocket(WebSocketConnection):
    """The server's end. It never closes its stream: whoever owns that does, when the last words were read."""

    def __init__(self, stream: trio.abc.Stream, max_message_size: Callable[[], int], held: Held) -> None:
        self.max_message_size = max_message_size  # bytes; asked for each message: it grows once the model is known
        self._protocol = WebSocketProtocol(max_message_size, held)
        super().__init__(
            stream,
            self._protocol,
            message_queue_size=1,
            max_message_size=max_message_size(),
            receive_buffer_size=READ_SIZE,
        )

    def receive_handshake(self, seen: bytes) -> None:
        """Take what was read already. Raises wsproto's ProtocolError, or UnicodeError, if it is none."""
        self._protocol.receive_data(seen)

    async def open(self, nursery: trio.Nursery) -> WebSocketRequest:
        """The proposal in the handshake that was received; what follows it is read in this nursery."""
        nursery.start_soon(self._reader_task)
        return await self._get_request()

    async def get_message(self) -> str | bytes:
        """The next message. Raises OverBudget in place of one that was not kept, and ConnectionClosed."""
        message = await super().get_message()
        if isinstance(message, RefusedText):
            raise message.refusal
        return message

    async def _handle_message_event(self, event: TextMessage | BytesMessage) -> None:
        self._max_message_size = self.max_message_size()
        if isinstance(event.data, RefusedText):
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._send_channel.send(event.data)
        else:
            await super()._handle_message_event(event)
            object.__setattr__(event, "data", type(event.data)())  # trio-websocket has the event until the next comes

    async def send(self, messages: Sequence[TextMessage]) -> None:
        """Write these, or parts of one, at once; between parts only pings and pongs may go. Raises ConnectionClosed."""
        if self._close_reason:
            raise ConnectionClosed(self._close_reason)
        await self._send(TextMessages(messages))

    async def _close_stream(self) -> None:
        self._reader_running = False
        await trio.lowlevel.checkpoint()
