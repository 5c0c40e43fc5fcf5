"""A WebSocket client without a socket: a real protocol on wires that are moved by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    CloseConnection,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)

from trioengine.testing.simulated_peer import Mood, SimulatedPeer

OnEvent = Callable[[dict[str, Any]], None]


class SimulatedClient(SimulatedPeer):
    """`on_event` gets every event that the server sends."""

    def __init__(self, target: str, on_event: OnEvent) -> None:
        super().__init__()
        self.accepted = False
        self._on_event = on_event
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._unsent: list[str] = []  # until the server has accepted the connection
        self._text = ""
        self.to_server.put(self._protocol.send(Request(host="localhost", target=target)))

    # ---- what it says ---------------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        state = self._protocol.state
        return self.is_there and state in (ConnectionState.CONNECTING, ConnectionState.OPEN)

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
        self._protocol.receive_data(data)
        for event in self._protocol.events():
            match event:
                case AcceptConnection():
                    self.accepted = True
                    for text in self._unsent:
                        self.send(text)
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
                case Ping() | CloseConnection() | Pong() | RejectConnection() | RejectData():
                    pass
                case _:
                    raise AssertionError(f"the server sent {event!r}")
