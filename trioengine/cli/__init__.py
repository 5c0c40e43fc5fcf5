"""The command line. An error is one line on stderr and exit code 1, or 2 for a usage error; never a traceback."""

from __future__ import annotations

import os
import signal
import sys

_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor
_INTERRUPTED, _TERMINATED = 130, 143  # exit codes


def main() -> None:
    """Run the command line and exit: the entry point `trioengine`."""
    terminations: list[int] = []
    try:
        _end_at_sigterm(terminations)
        _open_missing()
        from trioengine.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # during the import
        code = _INTERRUPTED
    sys.exit(_TERMINATED if terminations else code)


def _end_at_sigterm(terminations: list[int]) -> None:
    """Let SIGTERM, recorded in `terminations`, end the command as SIGINT does, so that it cleans up."""

    def interrupt(signum: int, frame: object) -> None:
        terminations.append(signum)
        signal.raise_signal(signal.SIGINT)  # its handler may be trio's, which chooses where tasks are interrupted

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background jobs
    signal.signal(signal.SIGTERM, interrupt)


def _open_missing() -> None:
    """Open /dev/null for standard descriptors that were closed at the start, for this process and the worker.

    Otherwise the next file that is opened would take their place.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD):
        os.set_inheritable(fd, True)
        name, mode = _STANDARD[fd]
        setattr(sys, name, os.fdopen(fd, mode))
    os.close(fd)
