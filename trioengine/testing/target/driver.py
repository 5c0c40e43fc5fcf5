"""Performs the machine's operations on trio sockets."""

from __future__ import annotations

import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any, TypeVar

import trio

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


class TrioDriver:
    """Performs actions on the server at an address; every socket is closed when an action ends or is cancelled."""

    def __init__(self, host: str, port: int, pid: int | None = None) -> None:
        self._address = (host, port)
        self._pid = pid
        self._sockets: dict[int, trio.socket.SocketType] = {}
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

    def _close_all(self) -> None:
        for number in list(self._sockets):
            self._leave(number, Close.RST)
        if self._is_stopped:
            self._signal("CONT")

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
            case Signal(name):
                return self._signal(name)
            case Figures():
                return figures_of(self._pid)
        return None

    async def _connect(self, client: int) -> bool:
        self._leave(client, Close.FIN)
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        opened = trio.socket.socket(family, socket.SOCK_STREAM)
        self._sockets[client] = opened
        with trio.move_on_after(CONNECT_TIMEOUT):
            try:
                await opened.connect(self._address)
            except OSError:
                return False
            return True
        return False

    async def _send(self, client: int, data: bytes, timeout: float) -> bool:
        if client not in self._sockets:
            return False
        rest = memoryview(data)
        with trio.move_on_after(timeout):
            try:
                while rest:
                    rest = rest[await self._sockets[client].send(rest) :]
            except OSError:
                return False
            return True
        return False

    async def _receive(self, client: int, timeout: float) -> bytes | End:
        if client not in self._sockets:
            return End.CLOSED
        with trio.move_on_after(timeout):
            try:
                return await self._sockets[client].recv(65536) or End.CLOSED
            except OSError:
                return End.RESET
        return End.TIMEOUT

    def _leave(self, client: int, how: Close) -> None:
        if client not in self._sockets:
            return
        opened = self._sockets[client]
        if how is Close.HALF:
            try:
                opened.shutdown(socket.SHUT_WR)
            except OSError:
                return  # the server has left already
            return
        if how is Close.RST:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        opened.close()
        del self._sockets[client]

    def _signal(self, name: str) -> bool:
        if self._pid is None:
            return False
        try:
            os.kill(self._pid, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return False
        self._is_stopped = name == "STOP"
        return True


def figures_of(pid: int | None) -> tuple[int, int] | None:
    """Return a process's RSS in bytes and its open descriptors, None if they cannot be read."""
    if pid is None:
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
