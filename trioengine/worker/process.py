"""The worker as a process: its descriptors, its signals and its end.

The supervisor spawns it in a session, hence a process group, of its own: `python -m trioengine.worker --in FD --out FD
--payloads FD --parent PID`. It never outlives its parent, whose death it learns from a pidfd: a forked child of
the parent keeps the pipe open, so EOF does not suffice, and PR_SET_PDEATHSIG is tied to the thread that spawned.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Sequence

from trioengine.worker.loop import Load, serve
from trioengine.worker.transport import Progress, Transport, start_receiving


def run(arguments: Sequence[str], load: Load) -> int:
    """Serve the parent over the descriptors that it names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trioengine.worker")
    parser.add_argument("--in", dest="fd_in", type=int, required=True, metavar="FD")
    parser.add_argument("--out", dest="fd_out", type=int, required=True, metavar="FD")
    parser.add_argument("--payloads", type=int, metavar="FD", help="an end of a SOCK_SEQPACKET pair")
    parser.add_argument("--parent", type=int, required=True, metavar="PID")
    parser.add_argument("--log-level", type=int, default=logging.WARNING, metavar="LEVEL")
    options = parser.parse_args(arguments)
    _print_to_the_log()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("trioengine").setLevel(options.log_level)
    faulthandler.enable(file=2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _watch_parent(options.parent)
    for fd in filter(None, (options.fd_in, options.fd_out, options.payloads)):
        os.set_inheritable(fd, False)  # a grandchild that holds them hides our end from the parent
        os.set_blocking(fd, True)
    transport = Transport(options.fd_in, options.fd_out, Progress(time.monotonic), kill_own_group)
    transport.start()
    if options.payloads is not None:
        start_receiving(options.payloads, transport.report)
    return serve(transport, load, time.monotonic)


def _print_to_the_log() -> None:
    """Send the prints of libraries to stderr, the log; to nowhere if the parent has no log."""
    try:
        os.fstat(2)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)


def kill_own_group() -> None:
    """End this process and its children at once, in the middle of whatever they do."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)  # not the leader: the group belongs to another process


def _watch_parent(parent: int) -> None:
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        kill_own_group()
        return
    if os.getppid() != parent:  # it died before the pidfd was open, which may be another process's now
        kill_own_group()
    threading.Thread(target=_await_death, args=(pidfd,), name="parent watch", daemon=True).start()


def _await_death(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    kill_own_group()
