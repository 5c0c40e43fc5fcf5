"""The command line. Errors are one line on stderr and exit code 1, or 2 for what was typed; never a traceback."""

from __future__ import annotations

import os
import sys

_STANDARD = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor


def main() -> None:
    """The entry point `trioengine`."""
    _open_missing()
    from trioengine.cli.app import run

    sys.exit(run(sys.argv[1:]))


def _open_missing() -> None:
    """Standard descriptors that were closed when we were started read and write nothing, here and in the worker.

    Left closed, the next file that is opened would take their place.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < len(_STANDARD):
        os.set_inheritable(fd, True)
        name, mode = _STANDARD[fd]
        setattr(sys, name, os.fdopen(fd, mode))
    os.close(fd)
