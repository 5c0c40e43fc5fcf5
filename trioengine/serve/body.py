"""Streamed response bodies: sending pieces to a client, and detecting its disconnect.

A client has disconnected when its connection is closed or broken, or when it reads nothing for `send_timeout` seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import trio
from wsproto.utilities import ProtocolError

Bytes: TypeAlias = bytes | bytearray | memoryview
Frame: TypeAlias = Callable[[bytes], bytes]  # turns a piece of the body into the bytes to send

logger = logging.getLogger("trioengine")
CHUNK = 1 << 16  # bytes
KEEP_ALIVE = 15.0  # seconds of silence after which a stream sends its keep-alive


class Disconnected(Exception):
    """The client has closed the connection, or does not read."""


class Sender:
    """Sends on a stream, for one task at a time.

    Bytes that the socket takes at once are handed to the kernel directly: a round of trio's scheduler costs several
    times as much. So `send_all` is a checkpoint only where it has to wait, and its caller needs another.
    """

    __slots__ = ("_stream", "send_now")

    def __init__(self, stream: trio.abc.SendStream) -> None:
        """A stream other than a socket may bring a `send_now` of its own, as a simulated one does."""
        self._stream = stream
        self.send_now: Callable[[Bytes], int]  # sends without waiting, and returns how many bytes were taken
        if isinstance(stream, trio.SocketStream):
            self.send_now = partial(_write, stream.socket.fileno)
        else:
            self.send_now = getattr(stream, "send_now", _take_nothing)

    async def send_all(self, data: Bytes) -> None:
        """Send all of `data`; raises the errors of the stream's own `send_all`."""
        sent = self.send_now(data)
        if sent < len(data):
            await self._stream.send_all(memoryview(data)[sent:])


def _write(fileno: Callable[[], int], data: Bytes) -> int:
    try:
        return os.write(fileno(), data)  # never blocks: trio has made the socket non-blocking
    except OSError:  # full, or broken: then the stream's send_all raises the error
        return 0


def _take_nothing(data: Bytes) -> int:
    return 0


class Body:
    """A streamed response body that also detects the client's disconnect.

    On a disconnect `on_disconnect` is called in the same step, then the nursery is cancelled, and the handler with it.
    """

    __slots__ = (
        "_frame",
        "_head",
        "_is_over",
        "_keep_alive",
        "_now",
        "_num_waiting",
        "_nursery",
        "_send_bytes",
        "_send_timeout",
        "_sender",
        "_sending",
        "_sent",
        "_since",
        "disconnected",
        "on_disconnect",
        "started",
    )

    def __init__(self, sender: Sender, nursery: trio.Nursery, send_timeout: float) -> None:
        self.started = False  # the head was sent: errors from here on must be part of the body
        self.disconnected: Exception | None = None  # the reason why the client is served no more
        self.on_disconnect: Callable[[], object] = _do_nothing
        self._sender = sender
        self._send_bytes = sender.send_now  # kept here: each piece of the body touches one object fewer
        self._nursery = nursery
        self._send_timeout = send_timeout  # seconds
        self._head: Callable[[], bytes] = bytes
        self._frame: Frame = bytes
        self._keep_alive = b""
        self._now = trio.lowlevel.current_clock().current_time
        self._since = self._now()  # when a send began, or the last one ended
        self._sending = False
        self._num_waiting = 0  # tasks in `send` that wait until another send is over
        self._is_over = False
        self._sent = trio.Event()

    def start(self, head: Callable[[], bytes], frame: Frame, keep_alive: bytes) -> None:
        """Make the body ready for its first piece, before which the result of `head` is sent.

        `frame` is applied to each piece. Unless it is empty, `keep_alive` is a piece to be sent after a silence.
        """
        self._head, self._frame, self._keep_alive = head, frame, keep_alive

    def skip(self) -> None:
        """Send nothing here: the client gets a whole response instead."""
        self._is_over = True

    def disconnect(self, reason: Exception) -> None:
        """Stop serving the client, which is gone or has to go; the first reason stays."""
        if self.disconnected is None:
            self.disconnected = reason
            self.on_disconnect()
        self._nursery.cancel_scope.cancel()

    async def send(self, piece: bytes, *, is_last: bool = False) -> None:
        """Send a piece that is not empty, in one write if it is short. After the last one no keep-alive is sent.

        Cancelled before it begins, or called after a disconnect, it sends nothing; cancelled later, it leaves a torn
        body behind.
        """
        self._num_waiting += 1
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            while self._sending:  # a keep-alive, another task's piece, or the rest of one
                if self._sent.is_set():
                    self._sent = trio.Event()
                await self._sent.wait()
        finally:
            self._num_waiting -= 1
        if is_last:
            self._keep_alive = b""
        data = self._frame(piece) if self.started else self._head() + self._frame(piece)
        self._sending, self.started = True, True
        await self._send_all(data)

    @property
    def can_send_now(self) -> bool:
        """Whether the body has started, and no other send stands before the next piece."""
        return self.started and not (self._sending or self._num_waiting or self.disconnected)

    def send_now(self, piece: bytes) -> None:
        """Send a piece while `can_send_now`; the part that the socket does not take at once follows by itself."""
        data = self._frame(piece)
        sent = self._send_bytes(data)
        self._since = self._now()
        if sent < len(data):
            self._sending = True
            self._nursery.start_soon(self._send_all, data[sent:])

    async def end(self, last: bytes) -> None:
        """Send the last bytes without a frame; nothing follows."""
        self._frame = bytes
        await self.send(last)
        self._is_over = True

    async def _send_all(self, data: bytes) -> None:
        """Send in 64 KiB slices, each with its own timeout, so that slow readers are not treated as stalled."""
        try:
            for start in range(0, len(data), CHUNK):
                self._since = self._now()
                await self._sender.send_all(data[start : start + CHUNK])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.disconnect(Disconnected("it closed the connection"))
            await trio.sleep_forever()
        finally:
            self._sending, self._since = False, self._now()
            self._sent.set()

    async def watch(self) -> None:
        """Detect a stalled client; send keep-alives while the stream is silent.

        One task for all sends: a deadline for each would cost as much as the send.
        """
        while not self._is_over:
            since = self._since
            await trio.sleep_until(since + min(KEEP_ALIVE, self._send_timeout))
            if self._since == since:  # no send has begun or ended meanwhile
                await trio.sleep_until(since + (self._send_timeout if self._sending else KEEP_ALIVE))
            if self._since == since and self._sending:
                self.disconnect(Disconnected("it does not read"))
            elif self._since == since and not self._is_over:
                await self._break_silence()

    async def _break_silence(self) -> None:
        if not self._keep_alive:
            self._since = self._now()
            return
        with trio.move_on_after(self._send_timeout) as scope:
            await self.send(self._keep_alive)
        if scope.cancelled_caught:
            self.disconnect(Disconnected("it does not read"))


def _do_nothing() -> None:
    pass


class DisconnectCounter:
    """Counts clients of one server, HTTP and WebSocket, that disconnected with something in flight."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count one if the block raises Disconnected, by itself or in a group."""
        try:
            yield
        except Disconnected:
            self.count += 1
            raise
        except BaseExceptionGroup as group:
            self.count += group.subgroup(Disconnected) is not None
            raise


def log_disconnect(cause: BaseException | str) -> None:
    """Log the line of a client that leaves, or is made to leave; it never quotes the client."""
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
