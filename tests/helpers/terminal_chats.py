"""`trioengine chat` on a terminal of its own: a process that a test types to."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

PATIENCE = 60  # seconds

CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT = b"> "

CHAT = """
import sys
from contextlib import asynccontextmanager

from trioengine.cli import chat_session, main
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.worker.scheduling.sequence import Limits

LIMITS = Limits(vocab_size=259, max_model_len=100_000, kv_blocks_total=20_000, block_size=16, max_num_seqs=8,
                max_num_batched_tokens=64)

@asynccontextmanager
async def open_engine(config, **options):
    print("loading", flush=True)
    behaviour = Behaviour(load_time=LOAD_TIME, step_time=0.002)
    async with simulated_engine(limits=LIMITS, behaviours=[behaviour]) as (engine, _):
        yield engine

chat_session.open_engine = open_engine
LOAD_TIME = float(sys.argv.pop(1))
sys.argv = ["trioengine", "chat", "--ignore-eos", "--temperature", "0", *sys.argv[1:]]
main()
"""


class Chat:
    """A process with a terminal of its own, and its output there."""

    def __init__(self, process, master):
        self.process = process
        self.shown = b""
        self._master = master

    def type(self, data):
        os.write(self._master, data)

    def until(self, *expected):
        """Read until one of these was shown since the last call; returns the output up to its end."""
        deadline = time.monotonic() + PATIENCE
        pattern = re.compile(b"|".join(re.escape(text) for text in expected))
        while (match := pattern.search(self.shown)) is None:
            assert select.select([self._master], [], [], deadline - time.monotonic())[0], self.shown
            try:
                received = os.read(self._master, 4096)
            except OSError:  # no process has the terminal open any more
                received = b""
            assert received, self.shown
            self.shown += received
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before

    def leave(self, key=CTRL_D):
        self.type(key)
        assert self.process.wait(PATIENCE) == 0

    def settings(self):
        return termios.tcgetattr(self._master)[3]


def _take_terminal():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def chat(*options, load_time=0, columns=80, before=""):
    """A chat with an engine on a simulated worker; `before` is code that runs first."""
    return on_a_terminal("-c", before + CHAT, str(load_time), *options, columns=columns)


@contextmanager
def on_a_terminal(*arguments, columns=80):
    """A Python process whose standard descriptors are a terminal."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=_take_terminal,
        env=os.environ | {"TERM": "dumb", "INPUTRC": "/dev/null"},
    )
    try:
        yield Chat(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(terminal)


def ask(chat, text):
    """Type a message, and wait for its answer's beginning."""
    chat.type(text + b"\r")
    chat.until(b"\n")
    assert select.select([chat._master], [], [], PATIENCE)[0]
