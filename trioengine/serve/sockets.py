"""What every accepted connection gets, and how one is closed so that the client can still read what was said."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import trio

Bytes: TypeAlias = bytes | bytearray | memoryview

USER_TIMEOUT = 20.0  # seconds that sent bytes may stay unacknowledged
LINGER_TIMEOUT = 2.0
LINGER_BYTES = 8 << 20
CHUNK = 1 << 16
_TCP_USER_TIMEOUT = 18  # linux/tcp.h; socket.TCP_USER_TIMEOUT exists on Linux only


def guard(stream: trio.abc.Stream) -> None:
    """Let the kernel notice a peer that is gone without a word."""
    if isinstance(stream, trio.SocketStream):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(USER_TIMEOUT * 1000))


def peer(stream: trio.abc.Stream) -> str | None:
    """The address of the other end, where it has one."""
    if not isinstance(stream, trio.SocketStream):
        return None
    try:
        name = stream.socket.getpeername()
    except OSError:  # it is gone already
        return None
    return address(*name[:2]) if isinstance(name, tuple) else None  # a socket of another kind


def host_of(stream: trio.abc.Stream) -> str | None:
    """The other end's address without its port, where it has one."""
    name = peer(stream)
    return None if name is None else name.rpartition(":")[0].strip("[]")


def address(host: str, port: int) -> str:
    """As in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Sender:
    """Sends on a stream, for one task at a time.

    What a socket takes at once is handed to the kernel directly: a round of trio's scheduler costs several times as
    much. So `send_all` is a checkpoint only where it has to wait, and its caller needs another.
    """

    __slots__ = ("_stream", "send_now")

    def __init__(self, stream: trio.abc.SendStream) -> None:
        self._stream = stream
        self.send_now = _sends_now(stream)  # how many bytes are taken at once

    async def send_all(self, data: Bytes) -> None:
        """Send all of it, or raise what the stream does."""
        sent = self.send_now(data)
        if sent < len(data):
            await self._stream.send_all(memoryview(data)[sent:])


def _sends_now(stream: trio.abc.SendStream) -> Callable[[Bytes], int]:
    """A stream that is no socket may have a method `send_now` of its own, as a simulated one has."""
    if isinstance(stream, trio.SocketStream):
        return partial(_write, stream.socket)
    return getattr(stream, "send_now", _take_nothing)


def _write(sock: trio.socket.SocketType, data: Bytes) -> int:
    try:
        return os.write(sock.fileno(), data)  # it does not block: trio made it so
    except OSError:  # it is full, or broken, which the stream then says
        return 0


def _take_nothing(data: Bytes) -> int:
    return 0


async def linger(stream: trio.abc.Stream) -> None:
    """Say the end and read what still comes: closing with unread bytes resets, and the last answer is lost."""
    if not isinstance(stream, trio.abc.HalfCloseableStream):
        return
    with trio.move_on_after(LINGER_TIMEOUT), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_eof()
        received = 0
        while received < LINGER_BYTES and (data := await stream.receive_some(CHUNK)):
            received += len(data)
