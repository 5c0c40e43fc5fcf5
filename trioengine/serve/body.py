"""What every accepted connection gets, and how one is closed so that the client can still read what was said."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import trio
from wsproto.utilities import ProtocolError

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


if TYPE_CHECKING:
    from trioengine.serve.http import Response

Frame: TypeAlias = Callable[[bytes], bytes]  # a piece of the body as it is sent

KEEP_ALIVE = 15.0  # seconds of silence after which a stream says that it goes on


class Disconnected(Exception):
    """The client went away, or does not read."""


class Body:
    """The body of an answer, and an eye on the client that it is for.

    When the client goes away, `on_departure` is called in the same step, then whoever answers is cancelled. One that
    reads nothing for `send_timeout` seconds is gone, too.
    """

    __slots__ = (
        "_first_frame",
        "_frame",
        "_keep_alive",
        "_num_waiting",
        "_nursery",
        "_over",
        "_send_timeout",
        "_sender",
        "_sending",
        "_sent",
        "_since",
        "begun",
        "departed",
        "on_departure",
    )

    def __init__(self, sender: Sender, nursery: trio.Nursery, send_timeout: float) -> None:
        """The nursery is cancelled when the client departs."""
        self.begun = False  # the head was sent: what is wrong from here on must be told in the body
        self.departed: Exception | None = None  # why the client is served no more
        self.on_departure: Callable[[], object] = _nothing
        self._sender = sender
        self._nursery = nursery
        self._send_timeout = send_timeout  # seconds; a client that reads nothing for so long is gone
        self._first_frame: Frame = bytes
        self._frame: Frame = bytes
        self._keep_alive = b""
        self._since = trio.current_time()  # when a send began, or the last one ended
        self._sending = False
        self._num_waiting = 0  # tasks that send what they have when that is done
        self._over = False
        self._sent = trio.Event()

    def open(self, first_frame: Frame, frame: Frame, keep_alive: bytes) -> None:
        """Before the first piece: what makes bytes of it, and of each further one.

        `keep_alive` is a piece that is sent after a silence, if not empty.
        """
        self._first_frame, self._frame, self._keep_alive = first_frame, frame, keep_alive

    def depart(self, reason: Exception) -> None:
        """The client is gone, or has to go."""
        if self.departed is None:
            self.departed = reason
            self.on_departure()
        self._nursery.cancel_scope.cancel()

    async def send(self, piece: bytes) -> None:
        """Send a piece that is not empty, in one write if it is short.

        Cancelled before, it sends nothing, as when the client has departed; whoever cancels it later has torn the body.
        """
        self._num_waiting += 1
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            while self._sending:  # something that keeps the stream alive, or the rest of a piece
                self._sent = trio.Event()
                await self._sent.wait()
        finally:
            self._num_waiting -= 1
        frame = self._frame if self.begun else self._first_frame
        self._sending, self.begun = True, True
        await self._send_all(frame(piece))

    @property
    def can_send_now(self) -> bool:
        """Whether the stream has begun, and nothing stands before the next piece."""
        return self.begun and not (self._sending or self._num_waiting or self.departed)

    def send_now(self, piece: bytes) -> None:
        """Send a piece while `can_send_now`; what the socket does not take at once follows as soon as it does."""
        data = self._frame(piece)
        sent = self._sender.send_now(data)
        self._since = trio.current_time()
        if sent < len(data):
            self._sending = True
            self._nursery.start_soon(self._send_all, data[sent:])

    async def _send_all(self, data: bytes) -> None:
        """In slices, each of which has its time: a client that reads slowly is no client that does not read."""
        try:
            for start in range(0, len(data), CHUNK):
                self._since = trio.current_time()
                await self._sender.send_all(data[start : start + CHUNK])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.depart(Disconnected("it closed the connection"))
            await trio.sleep_forever()
        finally:
            self._sending, self._since = False, trio.current_time()
            self._sent.set()

    def forgo(self) -> None:
        """There is a whole response instead: nothing is sent here."""
        self._over = True

    async def end(self, last: bytes) -> None:
        """Send the last bytes as they are; nothing follows."""
        self._frame = bytes
        await self.send(last)
        self._over = True

    async def watch(self) -> None:
        """Notice a client that reads nothing, and keep one that waits company.

        One task for all sends: a deadline for each would cost as much as the send.
        """
        while not self._over:
            since = self._since
            await trio.sleep_until(since + min(KEEP_ALIVE, self._send_timeout))
            if self._since == since:  # nothing has begun or ended meanwhile
                await trio.sleep_until(since + (self._send_timeout if self._sending else KEEP_ALIVE))
            if self._since == since and self._sending:
                self.depart(Disconnected("it does not read"))
            elif self._since == since and not self._over:
                await self._break_silence()

    async def _break_silence(self) -> None:
        if not self._keep_alive:
            self._since = trio.current_time()
            return
        with trio.move_on_after(self._send_timeout) as scope:
            await self.send(self._keep_alive)
        if scope.cancelled_caught:
            self.depart(Disconnected("it does not read"))


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """An answer that takes time. The request is let go of, then `write` sends the body's pieces.

    Until the first piece it may return a whole response instead, or raise what becomes one. It is cancelled when the
    client goes away.
    """

    write: Callable[[Body], Awaitable[Response | None]]
    status: int = 200
    content_type: bytes = b"text/event-stream"
    headers: tuple[tuple[bytes, bytes], ...] = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
    keep_alive: bytes = b""  # a piece that says nothing


logger = logging.getLogger("trioengine")


class Departures:
    """One count for a server, of HTTP and WebSocket clients."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one where the body raises Disconnected, in a group or by itself."""
        try:
            yield
        except Disconnected:
            self.add()
            raise
        except BaseExceptionGroup as group:
            if group.subgroup(Disconnected) is not None:
                self.add()
            raise


def log_disconnect(cause: BaseException | str) -> None:
    """The one line of a client that leaves, or is made to leave, over HTTP or WebSocket; it never quotes the client."""
    logger.info("client disconnected: %s", cause if isinstance(cause, str) else _reason(cause))


def _reason(error: BaseException) -> str:
    match error:
        case Disconnected():
            return str(error)
        case trio.TooSlowError():
            return "it did not read, send or answer in time"
        case ProtocolError():
            return "it broke the protocol"
        case _:
            return "it closed the connection"
