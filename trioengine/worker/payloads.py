"""Payloads as they come from the engine: sealed memfds over a SOCK_SEQPACKET pair, received by a thread.

A message is the payload's id, 8 bytes little-endian, and exactly one descriptor (SCM_RIGHTS). Seals are checked, so
that a file cannot be shortened under a thread that reads it, which would be SIGBUS.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trioengine.core.errors import RemoteProtocolError
from trioengine.worker.scheduling.payloads import PayloadArrived

PAYLOAD_ID = struct.Struct("<Q")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_DESCRIPTOR = array.array("i").itemsize


class SealedPayload:
    """A PayloadSource: a sealed memfd, of which it owns the descriptor. RemoteProtocolError: it is not sealed."""

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
    """None at the end: the engine has closed its end, which the reader of the pipe notices, too."""
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
