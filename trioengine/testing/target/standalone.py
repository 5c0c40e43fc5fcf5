"""Performs the machine's operations on blocking sockets: the end of the script that is part of each finding.

It imports the standard library alone, and the modules before it in the script.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from typing import Any, TypeVar

from trioengine.testing.target.exchange import Target
from trioengine.testing.target.machine import Run
from trioengine.testing.target.processes import worker_of
from trioengine.testing.target.program import Step
from trioengine.testing.target.wire import (
    Action,
    Close,
    Connect,
    End,
    Leave,
    Now,
    Operation,
    Receive,
    Send,
    Signal,
    Wait,
)

T = TypeVar("T")


class BlockingDriver:
    """Performs actions on the server at an address, one operation at a time."""

    def __init__(self, host: str, port: int, pid: int | None) -> None:
        self._address = (host, port)
        self._pid = pid
        self._sockets: dict[int, socket.socket] = {}

    def run(self, action: Action[T]) -> T:
        """Perform an action to its end and return its result."""
        result: Any = None
        while True:
            try:
                operation = action.send(result)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            try:
                result = self._perform(operation)
            except TimeoutError:
                result = End.TIMEOUT if isinstance(operation, Receive) else False
            except OSError:
                result = End.RESET if isinstance(operation, Receive) else False

    def _perform(self, operation: Operation) -> object:
        match operation:
            case Connect(client):
                self._sockets[client] = socket.create_connection(self._address, timeout=10)
                return True
            case Send(client, data, timeout):
                self._sockets[client].settimeout(timeout)
                self._sockets[client].sendall(data)
                return True
            case Receive(client, timeout):
                self._sockets[client].settimeout(timeout)
                return self._sockets[client].recv(65536) or End.CLOSED
            case Leave(client, how) if client in self._sockets:
                self._leave(client, how)
            case Wait(seconds):
                time.sleep(seconds)
            case Now():
                return time.monotonic()
            case Signal(name, process):
                pid = self._pid if process == "server" else worker_of(self._pid)
                if pid is not None:
                    os.kill(pid, getattr(signal, f"SIG{name}"))
                return pid is not None
        return None

    def _leave(self, client: int, how: Close) -> None:
        if how is Close.HALF:
            self._sockets[client].shutdown(socket.SHUT_WR)
            return
        if how is Close.RST:
            self._sockets[client].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sockets.pop(client).close()


def reproduce(target: Target, steps: list[Step], tag: str, oracle: str, arguments: list[str]) -> int:
    """Run the program; return 1 if it fails, 0 if not.

    The arguments are a host and port, and the id of the server's process; both may be left out.
    """
    target.host = arguments[0] if arguments else target.host
    host, _, port = target.host.rpartition(":")
    pid = int(arguments[1]) if len(arguments) > 1 else None
    if key := os.environ.get("TARGET_API_KEY"):
        target.headers["Authorization"] = f"Bearer {key}"
    run = Run(target, steps, tag)
    BlockingDriver(host.strip("[]"), int(port), pid).run(run.perform())
    for event in run.log:
        sys.stdout.write(f"{event.at:8.3f}  {event.client:>9} {'->' if event.to_server else '<-'} {event.text}\n")
    for finding in run.findings:
        sys.stdout.write(f"{finding}\n")
    same = any(finding.oracle == oracle for finding in run.findings)
    sys.stdout.write("reproduced\n" if same else "another finding\n" if run.findings else "not reproduced\n")
    return int(bool(run.findings))
