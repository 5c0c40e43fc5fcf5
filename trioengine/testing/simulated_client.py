"""A WebSocket client without a socket: real frames, after a handshake of few words, on wires moved by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import CloseConnection, Ping, Pong, TextMessage

from trioengine.testing.simulated_peer import Mood, SimulatedPeer

OnEvent = Callable[[dict[str, Any]], None]
HANDSHAKE = (
    "GET {target} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
ACCEPTED, ACCEPTED_KEY = b"HTTP/1.1 101 ", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # for this key, which is RFC 6455's example


class SimulatedClient(SimulatedPeer):
    """`on_event` gets every event that the server sends."""

    def __init__(self, target: str, on_event: OnEvent) -> None:
        super().__init__()
        self.accepted = False
        self._on_event = on_event
        self._refused = False
        self._head = b""  # of what the server answers to the handshake
        self._protocol = Connection(ConnectionType.CLIENT)  # after the handshake
        self._unsent: list[str] = []  # until the server has accepted the connection
        self._text = ""
        self.to_server.put(HANDSHAKE.format(target=target).encode())

    # ---- what it says ---------------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        return self.is_there and not self._refused and self._protocol.state is ConnectionState.OPEN

    def send(self, text: str) -> None:
        """A message; many may be on their way."""
        if self.accepted:
            self.to_server.put(self._protocol.send(TextMessage(text)))
        else:
            self._unsent.append(text)

    def ping(self) -> None:
        if self.accepted:
            self.to_server.put(self._protocol.send(Ping()))

    def babble(self) -> None:
        self.to_server.put(b"\xff" * 8)

    def close(self) -> None:
        """Say goodbye; it is over when the server has answered."""
        if self.can_send and self.accepted:
            self.mood = Mood.WELL
            self.to_server.put(self._protocol.send(CloseConnection(code=1000)))
        else:
            self.hang_up()

    def on_goodbye(self, code: int) -> None:
        """The server closes the connection."""

    def _arrive(self, data: bytes) -> None:
        if not self.accepted:
            data = self._shake_hands(data)
        self._protocol.receive_data(data)
        for event in self._protocol.events():
            match event:
                case TextMessage():
                    self._text += event.data
                    if event.message_finished:
                        text, self._text = self._text, ""
                        self._on_event(json.loads(text))
                case Ping() if self._protocol.state is ConnectionState.OPEN:
                    self.to_server.put(self._protocol.send(event.response()))
                case CloseConnection() if self._protocol.state is ConnectionState.REMOTE_CLOSING:
                    self.on_goodbye(event.code)
                    self.to_server.put(self._protocol.send(event.response()))
                case Ping() | CloseConnection() | Pong():
                    pass
                case _:
                    raise AssertionError(f"the server sent {event!r}")

    def _shake_hands(self, data: bytes) -> bytes:
        """What follows the server's answer, if that has come and is not a refusal."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return b""
        self.accepted = head.startswith(ACCEPTED)
        self._refused = not self.accepted
        if self._refused:
            return b""
        assert ACCEPTED_KEY in head, f"the server accepted another handshake: {head!r}"
        for text in self._unsent:
            self.send(text)
        return rest
