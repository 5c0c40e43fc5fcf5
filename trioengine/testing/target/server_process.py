"""Starts a server with its worker, and performs the operations that act on their processes.

Every process that was started is ended by its id, however the block of `started` is left.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import trio

import trioengine
from trioengine.core.config import child_environment
from trioengine.testing.target import relay
from trioengine.testing.target.calibrate import NoTarget, calibrate
from trioengine.testing.target.dialects import TRIOENGINE
from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.exchange import Target
from trioengine.testing.target.processes import children_of
from trioengine.testing.target.wire import Ended, Limit, Operation, Pipes, ReadLog, Restart, Signal

LAUNCHER = (sys.executable, relay.__file__, "serve")
START_TIMEOUT = 180.0  # seconds until the server is ready; the first start may compile kernels
END_TIMEOUT = 10.0  # seconds from SIGKILL to the process's death
OPTIONS = {  # of the server: small limits, and short times
    "max-num-seqs": 4,
    "max-num-queued-reqs": 16,
    "max-model-len": 1024,
    "kv-cache-memory": 64 << 20,
    "num-threads": 1,
    "unresponsive-timeout": 3,
    "startup-timeout": 60,  # a compile may take most of it
    "ping-interval": 0.2,
    "shutdown-timeout": 2,
    "worker-shutdown-timeout": 3,
    "max-restarts": 20,
}
FIXED = {"host": "127.0.0.1", "port": 0, "log-level": "info"}
_LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
_LIMITS = {"memory": resource.RLIMIT_AS, "files": resource.RLIMIT_NOFILE}


class Child(NamedTuple):
    """A process by its id and a descriptor that refers to it even when the id belongs to another one."""

    pid: int
    pidfd: int


def command_line(arguments: Sequence[str], launcher: Sequence[str] = LAUNCHER) -> list[str]:
    """Return the command of a server: these arguments of `serve` beat the options above."""
    chosen, fixed = ([f"--{name}={value}" for name, value in options.items()] for options in (OPTIONS, FIXED))
    return [*launcher, *chosen, *arguments, *fixed]


class ServerProcess(TrioDriver):
    """A driver that has started its server; `started` makes one."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        super().__init__("127.0.0.1", 0)
        self._command = command
        self._pipes, self._log = directory / "pipes", directory / "log"
        self._server: subprocess.Popen[bytes] | None = None
        self.children: dict[str, Child] = {}  # by name; they stay after their death, until the next one is found
        self._stopped: set[str] = set()
        self._limits: dict[tuple[int, str], tuple[int, int]] = {}  # as they were, by process and resource
        self._log_read = 0  # bytes
        self._start_time = 0.0  # seconds

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._address)

    async def measured(self) -> Target:
        """Return the server as a target, with deadlines that have room for starts of the worker.

        One may hang: CPython may wait endlessly for a thread that finds no memory for its first frame.
        """
        target = await self.run(calibrate(Target(self.address, "", TRIOENGINE)))
        target.allow_starts(self._start_time, hang=_startup_timeout(self._command))
        return target

    # ---- start and end ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the server and wait until it is ready. Raises NoTarget."""
        begin = trio.current_time()
        server = self._spawn()
        with trio.move_on_after(START_TIMEOUT):
            while server.poll() is None:
                text = self._log.read_text(errors="replace")
                if (found := _LISTENING.search(text)) and "ready: " in text:
                    self._address = ("127.0.0.1", int(found[1]))
                    self._start_time = trio.current_time() - begin
                    self._find("worker")
                    return
                await trio.sleep(0.05)
        raise NoTarget(f"the server did not start: {self._log.read_text(errors='replace')[-600:].strip()}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the process in a session of its own, so that Ctrl+C does not reach it."""
        self._set_pipes("fast")
        self._log_read = 0
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        self._pid = self._server.pid
        self.children["server"] = Child(self._pid, os.pidfd_open(self._pid))
        return self._server

    def _environment(self) -> dict[str, str]:
        package = str(Path(trioengine.__file__).resolve().parent.parent)
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        return child_environment(os.environ) | {"PYTHONPATH": path, relay.PIPES: str(self._pipes)}

    async def end(self) -> None:
        """End the server and its worker at once; harmless when they have ended."""
        if self._server is None:
            return
        self._find("worker")
        self._kill("server")
        with trio.move_on_after(END_TIMEOUT, shield=True):
            await self._wait("server")
            self._server.wait()
        self._kill("worker")
        with trio.move_on_after(END_TIMEOUT, shield=True):
            await self._wait("worker")
        assert self._server.stdin is not None
        self._server.stdin.close()
        for child in self.children.values():
            os.close(child.pidfd)
        self.children.clear()
        self._limits.clear()
        self._stopped.clear()
        self._server = None

    def _kill(self, name: str) -> None:
        if name in self.children:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.children[name].pidfd, signal.SIGKILL)

    async def restart(self) -> None:
        await self.end()
        await self.start()

    # ---- operations -------------------------------------------------------------------------------------------------

    async def _perform(self, operation: Operation) -> object:
        match operation:
            case Signal(name, process):
                return self._send_signal(name, process)
            case Limit(process, kind, spare):
                return self._limit(process, kind, spare)
            case Pipes(way):
                self._set_pipes(way)
                return None
            case Ended(process, timeout):
                return await self._ended(process, timeout)
            case Restart():
                await self.restart()
                return self.address
            case ReadLog():
                return self._read_log()
        return await super()._perform(operation)

    def _close_all(self) -> None:
        super()._close_all()
        for name in list(self._stopped):
            self._send_signal("CONT", name)
        for pid, kind in list(self._limits):
            self._lift(pid, kind)
        self._set_pipes("fast")

    def _set_pipes(self, way: str) -> None:
        """Replace the file as a whole: the relay reads it at any time."""
        (new := self._pipes.with_suffix(".new")).write_text(way)
        new.replace(self._pipes)

    def _send_signal(self, name: str, process: str) -> bool:
        if process == "server":
            self._find("worker")  # which is not the server's child after its end
        child = self.children.get(process) if name == "CONT" else self._find(process)
        if child is None:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, getattr(signal, f"SIG{name}"))
        if name == "STOP":
            self._stopped.add(process)
        elif name == "CONT":
            self._stopped.discard(process)
        return True

    def _find(self, process: str) -> Child | None:
        """Return a process that lives: the server, its child or the child of that."""
        if process == "server":
            return self.children.get("server")
        parent = self._find("server" if process == "worker" else "worker")
        pid = None if parent is None else _child_of(parent.pid, relay.__file__ if process == "relay" else "")
        if pid is None:
            return None
        known = self.children.get(process)
        if known is None or known.pid != pid:
            if known is not None:
                os.close(known.pidfd)
                del self.children[process]
            with suppress(ProcessLookupError):
                self.children[process] = Child(pid, os.pidfd_open(pid))
        return self.children.get(process)

    def _limit(self, process: str, kind: str, spare: int | None) -> bool:
        if spare is None:
            for pid, limited in list(self._limits):
                if limited == kind:
                    self._lift(pid, kind)
            return True
        child = self._find(process)
        if child is None:
            return False
        try:
            value = _limit_of_files(child.pid, spare) if kind == "files" else _size(child.pid) + (spare << 20)
            before = resource.prlimit(child.pid, _LIMITS[kind])
            resource.prlimit(child.pid, _LIMITS[kind], (value, before[1]))
        except (OSError, ValueError):  # it has ended, or is about to
            return False
        self._limits.setdefault((child.pid, kind), before)
        return True

    def _lift(self, pid: int, kind: str) -> None:
        with suppress(OSError):
            resource.prlimit(pid, _LIMITS[kind], self._limits.pop((pid, kind)))

    async def _ended(self, process: str, timeout: float) -> int | None:
        with trio.move_on_after(timeout):
            await self._wait(process)
            return self._server.wait() if process == "server" and self._server is not None else 0
        return None

    async def _wait(self, process: str) -> None:
        if process in self.children:
            await trio.lowlevel.wait_readable(self.children[process].pidfd)

    def _read_log(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_read)
            data = log.read()
        self._log_read += len(data)
        return data.decode("utf-8", "replace")


@asynccontextmanager
async def started(command: Sequence[str]) -> AsyncIterator[ServerProcess]:
    """Start a server for the block. Raises NoTarget if it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="trioengine-fuzz-") as directory:
        server = ServerProcess(command, Path(directory))
        try:
            await server.start()
            yield server
        finally:
            await server.end()


def _startup_timeout(command: Sequence[str]) -> float:
    """Return the last one in the command, in seconds."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--startup-timeout", type=float, default=OPTIONS["startup-timeout"])
    return float(parser.parse_known_args(command)[0].startup_timeout)


def _child_of(parent: int, argument: str) -> int | None:
    """Return a child that lives, and has this argument."""
    for pid in children_of(parent):
        with suppress(OSError):
            if argument in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    return None


def _limit_of_files(pid: int, spare: int) -> int:
    """Return the limit of descriptors that leaves `spare` of them: it bounds their numbers."""
    taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    free = [number for number in range(len(taken) + spare + 1) if number not in taken]
    return free[spare]


def _size(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
