"""An accepted connection as a WebSocket: trio-websocket's, on a protocol that bears bad clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest
from wsproto.events import BytesMessage, TextMessage

from trioengine.serve.byte_budget import Held
from trioengine.serve.websocket_protocol import RefusedText, TextMessages, WebSocketProtocol

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
