"""The command line. Errors are one line on stderr and exit code 1, or 2 for what was typed; never a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point `trioengine`."""
    from trioengine.cli.app import run

    sys.exit(run(sys.argv[1:]))
