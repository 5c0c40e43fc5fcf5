"""The worker's end of the pipes: a reader thread, and writes from any thread.

Several threads meet here and in worker/process.py. The main thread runs steps and may be busy for seconds. The reader
thread decodes frames into a queue and answers PING itself. Another only waits for the parent's death, so that the
reader may block: it has no lock to wait for. Two more, for payloads and for decoding images, also put into the queue.

Two locks. `_state` guards the Connection, whose order check spans both directions; it is never held during I/O, so
a write that blocks does not stop the reading. `_write` is taken first and held over encoding and writing, so that
frames reach the pipe in the order in which the Connection approved them.

Payloads are sealed memfds that come over a SOCK_SEQPACKET pair. A message is the payload's id, 8 bytes little-endian,
and exactly one descriptor (SCM_RIGHTS). Seals are checked, so that a file cannot be shortened under a thread that reads
it, which would be SIGBUS.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from trioengine.core.connection import Connection, Role, Stage
from trioengine.core.errors import FrameTooLarge, RemoteProtocolError
from trioengine.core.messages import Activity, Fatal, FromWorker, Ping, Pong, RequestFailed, Shutdown, Tokens, ToWorker
from trioengine.worker.scheduling.engine_core import Event
from trioengine.worker.scheduling.images import PayloadArrived

READ_SIZE = 1 << 16
PAYLOAD_ID = struct.Struct("<Q")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_DESCRIPTOR = array.array("i").itemsize


class Progress:
    """The main thread's activity, for PONG; written by that thread, read by the reader."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state = (0, Activity.STARTING, clock())  # replaced as a whole: no lock is needed

    def enter(self, activity: Activity) -> None:
        """Another activity, or another step, begins; `seconds` count from here."""
        self._state = (self._state[0] + 1, activity, self._clock())

    def advance(self) -> None:
        """Count progress within the activity."""
        count, activity, since = self._state
        self._state = (count + 1, activity, since)

    def pong(self, ping: int) -> Pong:
        count, activity, since = self._state
        return Pong(ping, count, activity, self._clock() - since)


class Transport:
    """Messages over two blocking pipes.

    `on_lost` is called, in the thread that notices, when the engine has closed its end; in the worker it does not
    return.
    """

    def __init__(self, fd_in: int, fd_out: int, progress: Progress, on_lost: Callable[[], None]) -> None:
        self.progress = progress
        self._fd_in = fd_in
        self._fd_out = fd_out
        self._on_lost = on_lost
        self._connection = Connection(Role.WORKER)
        self._state = threading.Lock()
        self._write = threading.Lock()
        self._inbox: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._error: Exception | None = None  # to be raised by the next `receive`

    def start(self) -> threading.Thread:
        """Begin to read. The thread ends after SHUTDOWN, at the end of the stream, or with an error."""
        thread = threading.Thread(target=self._read, name="reader", daemon=True)
        thread.start()
        return thread

    def report(self, event: Event | Exception) -> None:
        """Put an event of another thread into the queue of messages, or the error that ended the thread."""
        self._inbox.put(event)

    def receive(self, *, timeout: float | None) -> list[Event]:
        """All messages and events that have come, in order; waits `timeout` seconds for the first, or without limit.

        Raises the error of another thread after the events before it: RemoteProtocolError if the engine broke rules.
        """
        if self._error is not None:
            raise self._error
        events: list[Event] = []
        for item in self._take(timeout):
            if isinstance(item, Exception):
                self._error = item
                break
            events.append(item)
        if self._error is not None and not events:
            raise self._error
        return events

    def _take(self, timeout: float | None) -> Iterator[Event | Exception]:
        try:
            yield self._inbox.get_nowait() if timeout == 0 else self._inbox.get(timeout=timeout)
            for _ in range(self._inbox.qsize()):  # bounded, so that a flood does not keep steps from running
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def send(self, message: FromWorker) -> None:
        """Write a message, blocking while the pipe is full; one that is too large is split or truncated.

        Raises LocalProtocolError for a message that is not allowed now.
        """
        with self._write:
            for frame in self._frames(message):
                self._write_all(frame)

    def _frames(self, message: FromWorker) -> Iterator[bytes]:
        try:
            with self._state:
                frame = self._connection.send(message)
        except FrameTooLarge:
            parts = split_or_truncate(message)
            if not parts:
                raise
            for part in parts:
                yield from self._frames(part)
        else:
            yield frame

    def _write_all(self, frame: bytes) -> None:
        view = memoryview(frame)
        try:
            while view:
                view = view[os.write(self._fd_out, view) :]
        except BrokenPipeError:
            self._on_lost()

    def _read(self) -> None:
        try:
            while data := os.read(self._fd_in, READ_SIZE):
                with self._state:
                    self._connection.receive_data(data)
                while (message := self._next_message()) is not None:
                    if isinstance(message, Ping):
                        self._answer(message)
                        continue
                    self._inbox.put(message)
                    if isinstance(message, Shutdown):
                        return
        except Exception as exc:
            self._inbox.put(exc)
            return
        self._on_lost()

    def _next_message(self) -> ToWorker | None:
        with self._state:
            return cast("ToWorker | None", self._connection.next_message())

    def _answer(self, ping: Ping) -> None:
        with self._write:
            if self._connection.stage is not Stage.FAILED:  # nothing is sent after FATAL; only senders change it
                for frame in self._frames(self.progress.pong(ping.ping)):
                    self._write_all(frame)


def split_or_truncate(message: FromWorker) -> tuple[FromWorker, ...]:
    """Return equivalent smaller messages, or one with the most useful part; none if it cannot be made smaller."""
    match message:
        case Tokens(rows=rows) if len(rows) > 1:
            half = len(rows) // 2
            return replace(message, rows=rows[:half]), replace(message, rows=rows[half:])
        case RequestFailed(message=text) if text:
            return (replace(message, message=text[: len(text) // 2]),)
        case Fatal(message=text, traceback=traceback) if text or traceback:  # a traceback's end is the most useful
            end = traceback[len(traceback) - len(traceback) // 2 :]
            return (replace(message, message=text[: len(text) // 2], traceback=end),)
    return ()


class SealedPayload:
    """A PayloadSource: owns the descriptor of a sealed memfd. Raises RemoteProtocolError unless it is sealed."""

    def __init__(self, fd: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise RemoteProtocolError(f"a payload is not a memfd: {exc.strerror}") from exc
        if seals & SEALS != SEALS:
            raise RemoteProtocolError(f"a payload has the seals {seals:#x}, and needs {SEALS:#x}")
        self.num_bytes = os.fstat(fd).st_size
        self._fd = fd

    @contextmanager
    def open(self) -> Iterator[memoryview]:
        if self.num_bytes == 0:  # which cannot be mapped
            yield memoryview(b"")
            return
        with mmap.mmap(self._fd, self.num_bytes, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            yield data

    def close(self) -> None:
        os.close(self._fd)


def start_receiving(fd: int, report: Callable[[PayloadArrived | Exception], None]) -> threading.Thread:
    """Report every payload that comes over this end of the pair, which the thread owns, until its end or an error.

    The error is the last report.
    """
    thread = threading.Thread(target=_receive, args=(fd, report), name="payloads", daemon=True)
    thread.start()
    return thread


def _receive(fd: int, report: Callable[[PayloadArrived | Exception], None]) -> None:
    with socket.socket(fileno=fd) as pair:
        try:
            while (arrived := _next(pair)) is not None:
                report(arrived)
        except Exception as exc:
            report(exc)


def _next(pair: socket.socket) -> PayloadArrived | None:
    """None at the end: the engine has closed its end, which the reader of the pipe also notices."""
    data, ancillary, flags, _ = pair.recvmsg(
        PAYLOAD_ID.size + 1, socket.CMSG_SPACE(2 * _DESCRIPTOR), socket.MSG_CMSG_CLOEXEC
    )
    if not data and not ancillary:
        return None
    descriptors = _descriptors(ancillary)
    try:
        if flags & socket.MSG_CTRUNC or len(descriptors) != 1 or len(data) != PAYLOAD_ID.size:
            is_cut = " and more" if flags & socket.MSG_CTRUNC else ""
            raise RemoteProtocolError(
                f"a payload came with {len(data)} bytes and {len(descriptors)} descriptors{is_cut}"
            )
        source = SealedPayload(descriptors[0])
    except RemoteProtocolError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    (payload,) = PAYLOAD_ID.unpack(data)
    return PayloadArrived(payload, source)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    received = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % _DESCRIPTOR])
    return received.tolist()
