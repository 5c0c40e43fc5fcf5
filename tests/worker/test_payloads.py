"""Payloads over a real socket pair: sealed memfds, whole or not at all, and no descriptor left open."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import socket
from array import array
from collections.abc import Iterator

import pytest
from toy_worker import memfds_of

from trioengine.core.errors import RemoteProtocolError
from trioengine.worker.scheduling.images import PayloadArrived
from trioengine.worker.transport import PAYLOAD_ID, SEALS, SealedPayload, start_receiving


def memfd(data: bytes = b"an image", seals: int = SEALS) -> int:
    fd = os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def num_memfds() -> int:
    """Descriptors of this process that are memfds of these tests."""
    return memfds_of(os.getpid())


class Pair:
    """The engine's end of a pair, and what the worker's thread reported."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reports: queue.SimpleQueue[PayloadArrived | Exception] = queue.SimpleQueue()
        self.thread = start_receiving(theirs.detach(), self._reports.put)

    def send(self, data: bytes, *fds: int) -> None:
        """The descriptors are passed on, and closed here."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)
        for fd in fds:
            os.close(fd)

    def report(self) -> PayloadArrived | Exception:
        return self._reports.get(timeout=60)

    def source(self, payload: int, data: bytes = b"an image") -> SealedPayload:
        self.send(PAYLOAD_ID.pack(payload), memfd(data))
        arrived = self.report()
        assert isinstance(arrived, PayloadArrived)
        assert arrived.payload == payload
        assert isinstance(arrived.source, SealedPayload)
        return arrived.source


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = num_memfds()
    pair = Pair()
    yield pair
    pair.socket.close()
    pair.thread.join()
    assert num_memfds() == before


def test_a_payload_is_read_as_it_was_sealed(pair: Pair) -> None:
    source = pair.source(2**63)
    assert source.num_bytes == 8
    assert num_memfds() == 1
    for _ in range(2):
        with source.open() as data:
            assert bytes(data) == b"an image"
            assert data.readonly
    source.close()


def test_an_empty_payload_is_empty(pair: Pair) -> None:
    source = pair.source(1, b"")
    with source.open() as data:
        assert bytes(data) == b""
    source.close()


def test_many_payloads_arrive_in_order(pair: Pair) -> None:
    sources = [pair.source(number, b"%d" % number) for number in range(1, 100)]
    assert num_memfds() == 99
    for number, source in enumerate(sources, 1):
        with source.open() as data:
            assert bytes(data) == b"%d" % number
        source.close()


def test_the_end_of_the_engine_ends_the_thread(pair: Pair) -> None:
    pair.socket.close()
    pair.thread.join()
    assert pair._reports.empty()


@pytest.mark.parametrize(
    ("data", "count", "said"),
    [
        (PAYLOAD_ID.pack(1), 0, "8 bytes and 0 descriptors"),
        (PAYLOAD_ID.pack(1), 2, "8 bytes and 2 descriptors"),
        (PAYLOAD_ID.pack(1), 20, "8 bytes and 2 descriptors and more"),
        (b"short", 1, "5 bytes and 1 descriptors"),
        (PAYLOAD_ID.pack(1) + b"long", 1, "9 bytes and 1 descriptors"),
        (b"", 1, "0 bytes and 1 descriptors"),
    ],
    ids=["none", "two", "twenty", "short", "long", "empty"],
)
def test_what_is_no_payload_breaks_the_protocol_and_leaves_no_descriptor(
    pair: Pair, data: bytes, count: int, said: str
) -> None:
    pair.send(data, *[memfd() for _ in range(count)])
    error = pair.report()
    assert isinstance(error, RemoteProtocolError)
    assert str(error) == f"a payload came with {said}"
    pair.thread.join()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_WRITE, SEALS & ~fcntl.F_SEAL_SHRINK], ids=hex)
def test_what_is_not_sealed_breaks_the_protocol(pair: Pair, seals: int) -> None:
    pair.send(PAYLOAD_ID.pack(1), memfd(seals=seals))
    error = pair.report()
    assert isinstance(error, RemoteProtocolError)
    assert str(error) == f"a payload has the seals {seals:#x}, and needs {SEALS:#x}"


def test_what_is_no_memfd_breaks_the_protocol(pair: Pair) -> None:
    pair.send(PAYLOAD_ID.pack(1), os.open(__file__, os.O_RDONLY | os.O_CLOEXEC))
    error = pair.report()
    assert isinstance(error, RemoteProtocolError)
    assert str(error) == "a payload is not a memfd: Invalid argument"


def test_an_error_of_the_socket_is_reported() -> None:
    """Without payloads the worker would wait for images that cannot come."""
    reports: queue.SimpleQueue[PayloadArrived | Exception] = queue.SimpleQueue()
    unconnected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start_receiving(unconnected.detach(), reports.put).join()
    error = reports.get_nowait()
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOTCONN


def test_a_descriptor_is_not_inherited(pair: Pair) -> None:
    source = pair.source(1)
    assert not os.get_inheritable(source._fd)
    source.close()
