"""The WebSocket protocol of an accepted connection: wsproto's, also for clients that do not keep to the rules."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Pong, TextMessage

_NOT_UTF8 = 1007
_OFFENCES = {_NOT_UTF8: "a text message is not UTF-8"}  # by the code of the close
_OFFENCE = "the frames break the rules of RFC 6455"


@dataclass(frozen=True)
class TextMessages(Event):
    """Several, or parts of one, whose bytes go together."""

    messages: Sequence[TextMessage]


class WebSocketProtocol(WSConnection):
    """What trio-websocket reads and writes, in place of wsproto's own.

    Messages come whole, or as far as they are longer than `max_message_size`, so that it matters little in how many
    fragments they are sent. Who breaks the rules is told so by a close, and what may no more be said is left unsaid.
    """

    def __init__(self, max_message_size: int) -> None:
        super().__init__(ConnectionType.SERVER)
        self._max_message_size = max_message_size  # characters, or bytes
        self._parts = io.BytesIO()  # of the message that is on its way; of a text as UTF-8
        self._size = 0  # of these, in characters or bytes
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
        """The message that ends with this part, if one does, or is too long already."""
        self._size += len(event.data)
        if event.message_finished and self._size == len(event.data):
            self._size = 0
            yield event
            return
        self._parts.write(event.data.encode() if isinstance(event, TextMessage) else event.data)
        if event.message_finished or self._size > self._max_message_size:
            whole = self._parts.getvalue()
            self._parts, self._size = io.BytesIO(), 0
            yield TextMessage(data=whole.decode()) if isinstance(event, TextMessage) else BytesMessage(data=whole)
