"""The worker as a process: how it ends, whoever ends first, and what becomes of its output and its signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_worker import EngineEnd, image_of, memfd, memfds_of, request

from trioengine.core.config import WorkerConfig
from trioengine.core.messages import (
    AddSession,
    Audit,
    Audited,
    Configure,
    EndSession,
    Fatal,
    FatalCode,
    Loading,
    PayloadConsumed,
    Ping,
    Pong,
    RequestFailed,
    SessionEnded,
    Shutdown,
    Tokens,
)

SCRIPT = Path(__file__).with_name("toy_worker.py")
PARENT = """
import os, signal, subprocess, sys
fds = tuple(map(int, sys.argv[2:]))
command = [sys.executable, sys.argv[1], "--in", str(fds[0]), "--out", str(fds[1]), "--payloads", str(fds[2])]
command += ["--parent", str(os.getpid())]
print(subprocess.Popen(command, pass_fds=fds, start_new_session=True).pid, flush=True)
signal.pause()
"""


class Process:
    """A toy worker process and the engine's end of its pipes."""

    def __init__(self, engine: EngineEnd, popen: subprocess.Popen[str]) -> None:
        self.engine = engine
        self.popen = popen


@contextlib.contextmanager
def pipes(payloads: socket.socket | None = None) -> Iterator[tuple[EngineEnd, tuple[int, int, int]]]:
    to_worker, from_worker = os.pipe(), os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    engine = EngineEnd(from_worker[0], to_worker[1], ours)
    try:
        yield engine, (to_worker[0], from_worker[1], (payloads or theirs).detach())
    finally:
        ours.close()
        theirs.close()
        for fd in (engine.fd_in, engine.fd_out):
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def started(
    parent: int | None = None, *, new_session: bool = True, closed: str = "", payloads: socket.socket | None = None
) -> Iterator[Process]:
    """`closed`: what a shell closes before, as `2>&-`; `payloads`: takes the place of the worker's end of the pair."""
    with pipes(payloads) as (engine, fds):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, str(SCRIPT)]
        command += ["--in", str(fds[0]), "--out", str(fds[1]), "--payloads", str(fds[2])]
        popen = subprocess.Popen(
            [*command, "--parent", str(parent or os.getpid())],
            pass_fds=fds,
            start_new_session=new_session,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for fd in fds:
            os.close(fd)
        with popen:
            try:
                yield Process(engine, popen)
            finally:
                popen.kill()


def await_death(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.close(pidfd)


def test_shutdown_exits_with_0_and_what_is_printed_goes_to_the_log() -> None:
    with started() as process:
        process.engine.configure("noisy")
        process.engine.send(Shutdown())
        output, log = process.popen.communicate()
        assert process.popen.returncode == 0
        assert (output, log) == ("", "printed while loading\n")
        assert process.engine.receive() is None


@pytest.mark.parametrize("closed", ["2>&-", "1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
def test_without_standard_descriptors_it_works(closed: str) -> None:
    with started(closed=closed) as process:
        process.engine.configure("noisy")
        process.engine.send(Shutdown())
        assert process.popen.communicate() == ("", "")
        assert process.popen.returncode == 0


def test_a_bad_model_exits_with_1() -> None:
    with started() as process:
        process.engine.send(Configure(WorkerConfig("bad")))
        assert process.engine.receive() == Loading(1, 2)
        message = process.engine.receive()
        assert isinstance(message, Fatal)
        assert (message.code, message.message) == (FatalCode.MODEL, "no such model")
        assert process.engine.receive() is None
        assert process.popen.wait() == 1


def test_garbage_exits_with_1() -> None:
    with started() as process:
        process.engine.configure()
        process.engine.write(b"\x00" * 64)
        assert isinstance(process.engine.receive(), Fatal)
        assert process.popen.wait() == 1


def test_the_end_of_the_stream_kills_it_in_the_middle_of_its_work() -> None:
    with started() as process:
        process.engine.configure()
        process.engine.send(AddSession(1), request(1, 1, [1], max_tokens=500))
        assert isinstance(process.engine.receive(), Tokens)
        os.close(process.engine.fd_out)
        assert process.popen.wait() == -signal.SIGKILL


def test_the_end_of_the_stream_kills_its_children_too() -> None:
    with started() as process:
        child = os.pidfd_open(int(process.engine.configure("child").model_type))
        os.close(process.engine.fd_out)
        assert process.popen.wait() == -signal.SIGKILL
        await_death(child)


def test_a_child_does_not_hold_the_pipes() -> None:
    with started() as process:
        child = int(process.engine.configure("child").model_type)
        process.popen.kill()
        assert process.engine.receive() is None
        os.kill(child, signal.SIGKILL)


def test_in_a_group_of_others_it_only_ends_itself() -> None:
    with started(new_session=False) as process:
        process.engine.configure()
        os.close(process.engine.fd_out)
        assert process.popen.wait() == 1


def test_ctrl_c_is_the_parents_business() -> None:
    with started() as process:
        process.engine.configure()
        process.popen.send_signal(signal.SIGINT)
        process.engine.send(Ping(1))
        assert isinstance(process.engine.receive(), Pong)
        process.engine.send(Shutdown())
        assert process.popen.wait() == 0


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_parent_that_died_before_it_looked_is_noticed(is_alive: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other:
        if not is_alive:
            other.kill()
            other.wait()
        with started(parent=other.pid) as process:
            assert process.popen.wait() == -signal.SIGKILL
        other.kill()


def test_it_does_not_outlive_its_parent_even_when_the_pipes_stay_open() -> None:
    with pipes() as (engine, fds):
        command = [sys.executable, "-c", PARENT, str(SCRIPT), *map(str, fds)]
        with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            pidfd = os.pidfd_open(int(parent.stdout.readline()))
            for fd in fds:
                os.close(fd)
            engine.configure()
            parent.kill()
            await_death(pidfd)
        assert engine.receive() is None


def test_an_image_is_decoded_encoded_and_closed() -> None:
    with started() as process:
        engine = process.engine
        engine.configure("seeing")
        image = image_of(1, b"abc", [1])
        engine.send_payload(1, memfd(b"abc"))
        engine.send(AddSession(1), request(1, 1, [5, 0, 0], 1, image))
        tokens = engine.receive()
        assert isinstance(tokens, Tokens)
        assert [row.token_ids.tolist() for row in tokens.rows] == [[sum(b"abc")]]
        assert engine.receive() == PayloadConsumed(1)
        engine.send(Audit(1))
        audited = engine.receive()
        assert isinstance(audited, Audited)
        assert audited.payloads == ()
        assert memfds_of(process.popen.pid) == 0


def test_a_bad_image_fails_alone_and_its_descriptor_is_closed() -> None:
    with started() as process:
        engine = process.engine
        engine.configure("seeing")
        engine.send(AddSession(1), request(1, 1, [5, 0, 0], 1, image_of(1, b"bad", [1])))
        engine.send_payload(1, memfd(b"bad"))
        assert engine.receive() == RequestFailed(1, 1, "invalid_image", "messages[0].content[1]: it is bad")
        assert engine.receive() == PayloadConsumed(1)
        assert memfds_of(process.popen.pid) == 0
        engine.send(AddSession(2), request(2, 2, [5], 1))
        assert isinstance(engine.receive(), Tokens)


def test_payloads_of_an_ended_session_are_closed_when_they_come() -> None:
    with started() as process:
        engine = process.engine
        engine.configure("seeing")
        engine.send(AddSession(1), request(1, 1, [5, 0, 0], 1, image_of(1, b"abc", [1])), EndSession(1))
        assert isinstance(engine.receive(), SessionEnded)
        engine.send_payload(1, memfd(b"abc"))
        assert engine.receive() == PayloadConsumed(1)
        assert memfds_of(process.popen.pid) == 0


@pytest.mark.parametrize("model_path", ["seeing", None], ids=["configured", "before CONFIGURE"])
def test_what_is_no_payload_is_fatal(model_path: str | None) -> None:
    with started() as process:
        if model_path is not None:
            process.engine.configure(model_path)
        process.engine.payloads.send(b"nothing")
        message = process.engine.receive()
        assert isinstance(message, Fatal)
        assert message.message == "RemoteProtocolError: a payload came with 7 bytes and 0 descriptors"
        assert process.popen.wait() == 1


def test_a_payload_socket_that_fails_is_fatal() -> None:
    with started(payloads=socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as process:
        message = process.engine.receive()
        assert isinstance(message, Fatal)
        assert message.code is FatalCode.INTERNAL
        assert message.message == "OSError: [Errno 107] Transport endpoint is not connected"
        assert process.popen.wait() == 1


def test_a_payload_before_configure_is_fatal() -> None:
    with started() as process:
        process.engine.send_payload(1, memfd(b"abc"))
        message = process.engine.receive()
        assert isinstance(message, Fatal)
        assert message.message == "RemoteProtocolError: a payload before CONFIGURE"
