"""Performs the machine's operations on trio."""

from __future__ import annotations

import os
import signal
import socket
import struct
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import trio

from trioengine.testing.target.processes import figures_of, worker_of
from trioengine.testing.target.wire import (
    Action,
    Close,
    Connect,
    End,
    Figures,
    Leave,
    Now,
    Operation,
    Receive,
    Send,
    Signal,
    Wait,
)

T = TypeVar("T")
CONNECT_TIMEOUT = 10.0  # seconds
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST
_FAILED = (OSError, trio.BrokenResourceError)


class Connection(Protocol):
    """A client's end of a connection. A connection that has failed raises OSError or trio.BrokenResourceError."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`."""

    async def receive(self) -> bytes:
        """Wait for bytes; none are the end of the server's side."""

    def leave(self, how: Close) -> None:
        """Close the connection, or for Close.HALF the client's side of it."""


class Socket:
    """A connection over TCP."""

    def __init__(self, opened: trio.socket.SocketType) -> None:
        self._socket = opened

    async def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[await self._socket.send(rest) :]

    async def receive(self) -> bytes:
        return await self._socket.recv(65536)

    def leave(self, how: Close) -> None:
        if how is Close.HALF:
            self._socket.shutdown(socket.SHUT_WR)
            return
        if how is Close.RST:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()


class TrioDriver:
    """Performs actions on the server at an address; every connection is closed when an action ends or is cancelled."""

    def __init__(self, host: str, port: int, pid: int | None = None) -> None:
        self._address = (host, port)
        self._pid = pid
        self._connections: dict[int, Connection] = {}
        self._is_stopped = False

    async def run(self, action: Action[T]) -> T:
        """Perform an action to its end and return its result."""
        result: Any = None
        try:
            while True:
                try:
                    operation = action.send(result)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                result = await self._perform(operation)
        finally:
            self._close_all()

    async def dial(self) -> Connection:
        """Open a connection. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        opened = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            await opened.connect(self._address)
        except BaseException:
            opened.close()
            raise
        return Socket(opened)

    def figures(self) -> tuple[int, int] | None:
        """Return the RSS of the server's process in bytes and its open descriptors, None if they cannot be read."""
        return figures_of(self._pid)

    def _close_all(self) -> None:
        for number in list(self._connections):
            self._leave(number, Close.RST)
        if self._is_stopped:
            self._signal("CONT", "server")

    async def _perform(self, operation: Operation) -> object:
        match operation:
            case Connect(client):
                return await self._connect(client)
            case Send(client, data, timeout):
                return await self._send(client, data, timeout)
            case Receive(client, timeout):
                return await self._receive(client, timeout)
            case Leave(client, how):
                self._leave(client, how)
            case Wait(seconds):
                await trio.sleep(seconds)
            case Now():
                return trio.current_time()
            case Signal(name, process):
                return self._signal(name, process)
            case Figures():
                return self.figures()
        return None

    async def _connect(self, client: int) -> bool:
        self._leave(client, Close.FIN)
        with trio.move_on_after(CONNECT_TIMEOUT):
            try:
                self._connections[client] = await self.dial()
            except OSError:
                return False
            return True
        return False

    async def _send(self, client: int, data: bytes, timeout: float) -> bool:
        if client not in self._connections:
            return False
        with trio.move_on_after(timeout):
            try:
                await self._connections[client].send(data)
            except _FAILED:
                return False
            return True
        return False

    async def _receive(self, client: int, timeout: float) -> bytes | End:
        if client not in self._connections:
            return End.CLOSED
        with trio.move_on_after(timeout):
            try:
                return await self._connections[client].receive() or End.CLOSED
            except _FAILED:
                return End.RESET
        return End.TIMEOUT

    def _leave(self, client: int, how: Close) -> None:
        if client not in self._connections:
            return
        with suppress(*_FAILED):  # the server has left already
            self._connections[client].leave(how)
        if how is not Close.HALF:
            del self._connections[client]

    def _signal(self, name: str, process: str) -> bool:
        pid = self._pid if process == "server" else worker_of(self._pid)
        if pid is None:
            return False
        try:
            os.kill(pid, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return False
        if process == "server":
            self._is_stopped = name == "STOP"
        return True
