"""All contact with the outside: processes, threads, files, randomness. The simulation replaces it as a whole."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

import trioengine
from trioengine.actors.media import SealedBytes
from trioengine.aio.pipes import PipeReader
from trioengine.core.config import child_environment
from trioengine.core.errors import EngineError, WorkerLost
from trioengine.core.image import BytesLike
from trioengine.hub.adapter import read_adapter
from trioengine.hub.model_config import Shape
from trioengine.hub.model_info import ModelInfo, read_model
from trioengine.hub.pull import resolve

T = TypeVar("T")
WORKER: tuple[str, ...] = (
    "-m",
    "trioengine.worker",
)  # the program, as arguments of Python; a test may put its own before it
_STATUS = "/proc/{pid}/status"
PIPE_SIZE = 1 << 20  # bytes; the most that an unprivileged process may ask for by default
PAYLOAD_ID = struct.Struct("<Q")
MAX_PAYLOADS = 4096  # at once, so that AUDITED, with up to 9 bytes for each, fits a frame
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class WorkerProcess(Protocol):
    """One worker incarnation as the engine sees it."""

    @property
    def pid(self) -> int: ...

    @property
    def send_stream(self) -> trio.abc.SendStream: ...

    @property
    def receive_stream(self) -> trio.abc.ReceiveStream: ...

    async def send_payload(self, payload: int, sealed: SealedBytes) -> None:
        """Pass these bytes to the worker; the caller keeps its own descriptor. From one task only.

        It returns in the step in which they are sent: no other task sees the worker's reply before the caller goes on.
        Cancelled, it has sent nothing. Raises BrokenResourceError or ClosedResourceError where the worker is gone, or
        is about to be.
        """
        ...

    @property
    def is_alive(self) -> bool:
        """Whether nothing is known of its death yet. A SIGKILL that was sent to it is its death."""
        ...

    async def wait(self) -> None:
        """Wait, in one task, for the process's death (not for its pipe's end: a grandchild may hold that open)."""
        ...

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        ...

    def kill(self) -> None:
        """End it and all its children at once (SIGKILL to the process group). Harmless when it is dead."""
        ...

    def reap(self) -> int | None:
        """Kill the rest, give every descriptor back, and return the exit status; harmless when repeated.

        It does not block: None if the process, though killed, is not dead yet; so call it after `wait`.
        """
        ...


class SealedMemfd:
    """A sealed memfd: its descriptor, which another process may be given, and its size."""

    __slots__ = ("fd", "num_bytes")

    def __init__(self, chunks: Iterable[BytesLike]) -> None:
        """Write the chunks, which are dropped one by one, and seal the file. Blocks for some 0.3 ms a MB.

        Raises OSError if the system has no memory or no descriptor for it.
        """
        self.fd = os.memfd_create("trioengine-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for chunk in chunks:
                _write_all(self.fd, chunk)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self.num_bytes = os.fstat(self.fd).st_size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.fd)


def _write_all(fd: int, chunk: BytesLike) -> None:
    view = memoryview(chunk).cast("B")
    while view:
        view = view[os.write(fd, view) :]


class LocalWorkerProcess:
    """`python -m trioengine.worker` in a session of its own, with pipes, a payload socket and a pidfd."""

    def __init__(self, stderr: int | None = None) -> None:
        if sys.platform != "linux":
            raise EngineError(f"the worker needs Linux 5.4 or newer, not {sys.platform}")
        with ExitStack() as children, ExitStack() as ours:
            child_in, ours_out = _pipe(children, ours)
            ours_in, child_out = _pipe(ours, children)
            ours_payloads, child_payloads = _payload_sockets(ours, children)
            self._process = subprocess.Popen(
                _command(child_in, child_out, child_payloads),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(child_in, child_out, child_payloads),
                start_new_session=True,
                env=_environment(),
            )
            ours.callback(self._discard)
            self.pid = self._process.pid
            self._pidfd = os.pidfd_open(self.pid)
            self.send_stream = trio.lowlevel.FdStream(ours_out)
            self.receive_stream = PipeReader(ours_in)
            self._payload_socket = ours_payloads
            ours.pop_all()  # the streams' from here on
        self._is_reaped = False
        self._descriptors = ExitStack()
        self._descriptors.callback(os.close, self._pidfd)
        self._descriptors.callback(trio.lowlevel.notify_closing, self._pidfd)
        self._descriptors.callback(self.send_stream.close)
        self._descriptors.callback(self.receive_stream.close)
        self._descriptors.callback(self._payload_socket.close)
        self._descriptors.callback(trio.lowlevel.notify_closing, self._payload_socket)

    async def send_payload(self, payload: int, sealed: SealedBytes) -> None:
        assert isinstance(sealed, SealedMemfd), "made by the same ports"
        if self._is_reaped:
            raise trio.ClosedResourceError("the worker has been reaped")
        rights = array("i", [sealed.fd])
        while True:
            await trio.lowlevel.wait_writable(self._payload_socket)
            try:  # a trio socket's `sendmsg` ends with a checkpoint, in which other tasks run
                self._payload_socket.sendmsg(
                    [PAYLOAD_ID.pack(payload)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
                return
            except BlockingIOError:
                continue
            except OSError as exc:
                raise trio.BrokenResourceError(f"the payload socket: {exc}") from exc

    def _discard(self) -> None:
        """The process was started, and something after that failed."""
        self.kill()
        self._process.wait()  # blocks, but not for long: it has only begun to start Python

    @property
    def is_alive(self) -> bool:
        if self._is_reaped:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0) and not _is_being_killed(self.pid)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)

    def terminate(self) -> None:
        if self._process.returncode is None:  # not reaped: its id, and its group's, cannot belong to anyone else
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # Popen.send_signal would reap a dead leader

    def kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        self.kill()
        self._is_reaped = True
        self._descriptors.close()
        return self._process.poll()


def _is_being_killed(pid: int) -> bool:
    """Whether a SIGKILL is pending: the process may take a moment to die of it, but nothing can avert that."""
    try:
        status = Path(_STATUS.format(pid=pid)).read_text()
    except OSError:
        return False
    pending = next((line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:")), "0")
    return bool(int(pending, 16) >> (signal.SIGKILL - 1) & 1)


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """A large pipe, each end closed with its owner's stack."""
    fd_out, fd_in = os.pipe2(os.O_CLOEXEC)
    reader.callback(os.close, fd_out)
    writer.callback(os.close, fd_in)
    with suppress(OSError):  # over the user's limit for pipes: the default size works as well
        fcntl.fcntl(fd_in, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    return fd_out, fd_in


def _payload_sockets(ours: ExitStack, children: ExitStack) -> tuple[socket.socket, int]:
    """Our end of a pair that keeps messages whole, and the descriptor of the child's."""
    our_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    our_end.setblocking(False)
    ours.callback(our_end.close)
    children.callback(child_end.close)
    return our_end, child_end.fileno()


def _command(child_in: int, child_out: int, child_payloads: int) -> list[str]:
    level = logging.getLogger("trioengine").getEffectiveLevel()
    options = {"in": child_in, "out": child_out, "payloads": child_payloads, "parent": os.getpid(), "log-level": level}
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", str(value))]
    return [sys.executable, "-P", *WORKER, *arguments]


def _environment() -> dict[str, str]:
    """Return the environment without API keys, in which the worker finds a trioengine that is not installed."""
    package = str(Path(trioengine.__file__).resolve().parent.parent)
    if package == sysconfig.get_path("purelib"):
        return child_environment(os.environ)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return child_environment(os.environ) | {"PYTHONPATH": path}


async def spawn_worker(stderr: int | None = None) -> WorkerProcess:
    """Start a worker, which writes its log to `stderr`, a descriptor, or to our standard error. Raises WorkerLost."""
    try:
        return LocalWorkerProcess(stderr)
    except OSError as exc:
        raise WorkerLost(f"the worker process could not be started: {exc}") from exc


async def _run_in_thread(function: Callable[..., T], *args: Any) -> T:
    return await trio.to_thread.run_sync(partial(function, *args), abandon_on_cancel=True)


async def _finish_in_thread(function: Callable[..., T], *args: Any) -> T:
    return await trio.to_thread.run_sync(function, *args)


async def _find_model(model: str, progress: Callable[[int, int], None] | None) -> Path:
    def report(done: int, total: int) -> None:
        trio.from_thread.check_cancelled()  # raises in the thread, so that a download is ended with its caller
        if progress is not None:
            progress(done, total)

    return await trio.to_thread.run_sync(resolve, model, report)


def _mint_seed() -> int:
    return random.SystemRandom().getrandbits(63)


def _mint_secret() -> bytes:
    return os.urandom(32)


def _max_payloads() -> int:
    """A quarter of the descriptors that this process may open: the others are connections, mostly."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_PAYLOADS if soft == resource.RLIM_INFINITY else max(1, min(MAX_PAYLOADS, soft // 4))


@dataclass(frozen=True)
class Ports:
    """The outside world, as functions; the default is the real one.

    `run_in_thread` is for functions that change nothing: cancelled, their result is thrown away; `finish_in_thread`
    is for the others, and cannot be cancelled once it has begun. `read_model`, `check_adapter` and `seal` block, and
    are called through them.
    """

    spawn_worker: Callable[[], Awaitable[WorkerProcess]] = spawn_worker
    run_in_thread: Callable[..., Awaitable[Any]] = _run_in_thread
    finish_in_thread: Callable[..., Awaitable[Any]] = _finish_in_thread
    find_model: Callable[[str, Callable[[int, int], None] | None], Awaitable[Path]] = _find_model
    read_model: Callable[[Path], ModelInfo] = read_model
    check_adapter: Callable[[Path, Mapping[str, Shape]], object] = read_adapter
    mint_seed: Callable[[], int] = _mint_seed
    mint_secret: Callable[[], bytes] = _mint_secret
    seal: Callable[[Iterable[BytesLike]], SealedBytes] = SealedMemfd
    max_payloads: Callable[[], int] = _max_payloads
    num_cores: int = os.cpu_count() or 1
    thread_threshold: int = 1 << 13  # characters or tokens; a longer prompt is prepared in a thread
