"""The command line. Errors are one line on stderr and exit code 1, or 2 for what was typed; never a traceback."""

from __future__ import annotations

import os
import signal
import sys

_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor
_INTERRUPTED, _TERMINATED = 130, 143  # exit codes


def main() -> None:
    """The entry point `trioengine`."""
    terminations: list[int] = []
    try:
        _end_at_sigterm(terminations)
        _open_missing()
        from trioengine.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while that was loaded
        code = _INTERRUPTED
    sys.exit(_TERMINATED if terminations else code)


def _end_at_sigterm(terminations: list[int]) -> None:
    """SIGTERM, which is noted in `terminations`, ends everything as SIGINT does: nothing of ours is left behind."""

    def interrupt(signum: int, frame: object) -> None:
        terminations.append(signum)
        signal.raise_signal(signal.SIGINT)  # whose handler may be trio's, which chooses where tasks are interrupted

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
    signal.signal(signal.SIGTERM, interrupt)


def _open_missing() -> None:
    """Standard descriptors that were closed when we were started read and write nothing, here and in the worker.

    Left closed, the next file that is opened would take their place.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD):
        os.set_inheritable(fd, True)
        name, mode = _STANDARD[fd]
        setattr(sys, name, os.fdopen(fd, mode))
    os.close(fd)
