"""The progress bar on a terminal: it draws on stderr alone, and is over when the download is."""

import os
import pty
import subprocess
import sys

PROGRAM = """
import sys
from trioengine.cli.progress import download_bar

with download_bar() as progress:
    progress(1, 10)
    progress(10, 10)
    progress(10, 10)
    print("ANSWER")
    print("LOG", file=sys.stderr)
"""


def drawn(master):
    """What came to a terminal until nobody had it open any more."""
    data = b""
    try:
        while received := os.read(master, 4096):
            data += received
    except OSError:  # how Linux says so
        pass
    return data


def test_a_bar_leaves_the_output_alone():
    master, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=terminal, env=environment
    ) as p:
        os.close(terminal)
        shown = drawn(master)
        assert p.stdout.read() == b"ANSWER\n"
    os.close(master)
    show_cursor = b"\x1b[?25h"  # the last that rich writes
    assert shown.rindex(show_cursor) < shown.index(b"LOG")
    assert b"fetching the model" in shown
