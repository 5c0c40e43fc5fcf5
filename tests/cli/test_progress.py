"""The progress bar on a terminal: it draws on stderr alone, and is over when the download is."""

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from trioengine.cli.bars import download_bar

with download_bar() as progress:
    progress(1, 10)
    progress(10, 10)
    progress(10, 10)
    print("ANSWER")
    print("LOG", file=sys.stderr)
"""


def drawn(master):
    """The output to a terminal until no process had it open any more."""
    data = b""
    try:
        while received := os.read(master, 4096):
            data += received
    except OSError:  # Linux's error for that
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


SLOW = """
import time
from trioengine.cli.bars import download_bar

with download_bar() as progress:
    for done in (0, 100, {done}):
        progress(done, 1 << 30)
        time.sleep(0.2)
"""


@pytest.mark.parametrize(("done", "is_estimated"), [(200, False), (2 << 20, True)])
def test_no_estimate_before_it_means_something(done, is_estimated):
    environment = os.environ | {"COLUMNS": "120"}
    command = [sys.executable, "-c", SLOW.format(done=done)]
    shown = subprocess.run(command, stderr=subprocess.PIPE, env=environment, timeout=60, check=True).stderr
    assert b"fetching the model" in shown
    assert (b"/s" in shown) == is_estimated
    assert (b":" in shown) == is_estimated


LOADING = """
import sys
from trioengine.cli.progress import progress_bars

with progress_bars() as bars:
    bars.loading(1, 10)
    bars.loading(10, 10)
    print("LOG", file=sys.stderr)
    bars.loading(5, 10)
"""


def test_loading_is_shown_on_a_terminal_and_gone_when_it_is_done():
    master, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", LOADING], stderr=terminal, env=environment):
        os.close(terminal)
        shown = drawn(master)
    os.close(master)
    before, _, after = shown.partition(b"LOG")
    assert b"loading the model" in before
    assert before.endswith(b"\x1b[2K")  # the line is erased
    assert b"loading the model" not in after


def test_loading_is_no_line_of_a_log():
    command = [sys.executable, "-c", LOADING]
    assert subprocess.run(command, stderr=subprocess.PIPE, timeout=60, check=True).stderr == b"LOG\n"
