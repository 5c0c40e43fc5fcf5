"""`trioengine chat` on a terminal: a process of its own, on a simulated worker."""

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

import pytest

PATIENCE = 60  # seconds
CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT = b"> "
CHAT = """
import sys
from contextlib import asynccontextmanager

from trioengine.cli import main, sessions
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.worker.scheduling.limits import Limits

LIMITS = Limits(vocab_size=259, max_model_len=100_000, kv_blocks_total=20_000, block_size=16, max_num_seqs=8,
                max_num_batched_tokens=64)

@asynccontextmanager
async def open_engine(config, **options):
    print("loading", flush=True)
    behaviour = Behaviour(load_time=LOAD_TIME, step_time=0.002)
    async with simulated_engine(limits=LIMITS, behaviours=[behaviour]) as (engine, _):
        yield engine

sessions.open_engine = open_engine
LOAD_TIME = float(sys.argv.pop(1))
sys.argv = ["trioengine", "chat", "--ignore-eos", "--temperature", "0", *sys.argv[1:]]
main()
"""


class Chat:
    """A process with a terminal of its own, and what it has written there."""

    def __init__(self, process, master):
        self.process = process
        self.shown = b""
        self._master = master

    def type(self, data):
        os.write(self._master, data)

    def until(self, *expected):
        """Read until one of these was shown since the last time; gives what was shown up to its end."""
        deadline = time.monotonic() + PATIENCE
        pattern = re.compile(b"|".join(re.escape(text) for text in expected))
        while (match := pattern.search(self.shown)) is None:
            assert select.select([self._master], [], [], deadline - time.monotonic())[0], self.shown
            try:
                received = os.read(self._master, 4096)
            except OSError:  # nobody has the terminal open any more
                received = b""
            assert received, self.shown
            self.shown += received
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before

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


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    with chat() as user:
        user.until(PROMPT)
        before = user.settings()
        ask(user, b"hello")
        user.type(CTRL_C)
        user.until(b"\n(stopped)\r\n")
        user.until(b"> ")
        ask(user, b"again")
        user.type(CTRL_C)
        user.until(b"\n> ")
        user.type(b"/reset\r")
        user.until(b"The conversation is forgotten.")
        user.until(b"\n> ")
        user.type(b"half a line" + CTRL_C)
        user.until(b"\n(press Ctrl+C again, or /bye, to leave)\r\n> half a line")
        user.type(CTRL_C)
        assert user.process.wait(PATIENCE) == 130
        assert user.settings() & (termios.ECHO | termios.ICANON) == termios.ECHO | termios.ICANON
        assert not before & termios.ICANON  # a line was edited


@pytest.mark.parametrize("end", [b"/bye\r", b"/exit\r", CTRL_D])
def test_a_message_of_several_lines_help_and_the_end(end):
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(b"one \\\r")
        user.until("… ".encode())
        user.type(b"two\r")
        user.until(b"\n> ")
        user.type(b"/help\r")
        assert b"/reset" in user.until(b"\n> ")
        user.type(end)
        assert user.process.wait(PATIENCE) == 0


def test_editing_and_history():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(b"/hlp\x1b[D\x1b[De\r")  # two to the left
        assert b"Ctrl+C stops" in user.until(b"\n> ")
        user.type(b"\x1b[A\r")  # the last line again
        assert b"Ctrl+C stops" in user.until(b"\n> ")
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0


def test_a_ctrl_c_that_comes_after_the_answer_keeps_the_chat():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        for _ in range(2):  # each line has its own
            user.type(b"/hel")
            user.until(b"/hel")
            user.type(CTRL_C)
            user.until(b"\n(press Ctrl+C again, or /bye, to leave)\r\n> /hel")
            user.type(b"p\r")
            assert b"Ctrl+C twice" in user.until(b"\n> ")
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0


def test_sigterm_where_a_line_is_awaited_ends_the_chat():
    with chat() as user:
        user.until(PROMPT)
        user.process.terminate()
        assert user.process.wait(PATIENCE) == 143


def test_sigterm_in_the_middle_of_an_answer_ends_the_chat():
    with chat() as user:
        user.until(PROMPT)
        ask(user, b"hello")
        user.process.terminate()
        assert user.process.wait(PATIENCE) == 143


def test_a_message_that_cannot_be_answered():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(b"x" * 3000 + b"\\\r")
        user.until("… ".encode())
        user.type(b"\xff\r")
        user.until(b"trioengine: error: prompt is not UTF-8")
        user.until(b"\n> ")
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0


def test_a_chat_begins_with_the_model_and_the_way_to_help():
    with chat("toy") as user:
        first = b"toy: /help lists the commands, /bye or Ctrl+D ends the chat"
        assert user.until(PROMPT).splitlines()[1] == first


def test_an_empty_line_does_nothing():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        for line in (b"\r", b"  \r"):
            user.type(line)
            assert user.until(PROMPT) == line.replace(b"\r", b"\r\n") + PROMPT
        user.type(b"hello\r")
        assert len(user.until(b"\n> ").splitlines()[1]) == 3
        user.type(b"/bye\r")
        assert user.process.wait(PATIENCE) == 0


def test_an_empty_line_does_nothing_where_the_answers_go_to_a_file():
    master, terminal = pty.openpty()
    command = [sys.executable, "-c", CHAT, "0", "--max-tokens", "3"]
    with subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE) as process:
        os.write(master, b"\n\nhello\n" + CTRL_D)
        shown, _ = process.communicate(timeout=PATIENCE)
    os.close(master)
    os.close(terminal)
    assert process.returncode == 0
    assert re.fullmatch(rb"loading\n> > > ...\n> ", shown)


def test_everything_breaks_at_words():
    """The first line, the help, errors, and the notice of a reset."""
    with chat("toy", columns=25) as user:
        shown = user.until(PROMPT)
        for line in (b"/help", b"/reset", b"/nonesuch"):
            user.type(line + b"\r")
            shown += user.until(b"\n> ")
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0
    lines = shown.decode().splitlines()
    assert "unknown command" in shown.decode()
    assert max(map(len, lines)) <= 25
    words = set(shown.decode().split())
    assert {"commands,", "conversation", "conversation.", "trioengine:", "'/nonesuch';", "forgotten."} <= words


@pytest.mark.parametrize("command", [b"/hlp", b"/", b"/reset everything", b"/quit"])
def test_an_unknown_command_is_not_sent_to_the_model(command):
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(command + b"\r")
        refused = user.until(b"\n> ")
        assert b"trioengine: error: unknown command '" + command + b"'; /help lists the commands" in refused
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("message", [b"/etc/hosts: for what?", b" /help"])
def test_a_path_and_a_line_that_begins_with_a_space_are_messages(message):
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(message + b"\r")
        shown = user.until(b"\n> ")
        assert b"unknown command" not in shown
        assert b"forget the conversation" not in shown


IMPORTING = """
import os, select, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "trioengine.cli.chatting":
            os.write(1, b"importing\\n")
            select.select([0], [], [])

sys.meta_path.insert(0, Slow())
"""


def test_a_line_that_is_typed_while_the_program_is_imported_is_shown_once():
    with chat("--max-tokens", "3", before=IMPORTING) as user:
        user.until(b"importing\r\n")
        user.type(b"/reset\r")
        assert user.until(b"The conversation is forgotten.").count(b"/reset") == 1
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0


def test_ctrl_c_keeps_the_lines_that_were_typed_during_the_answer():
    with chat() as user:
        user.until(PROMPT)
        ask(user, b"hello")
        user.type(b"/reset\r/hel")
        user.type(CTRL_C)
        user.until(b"\n(stopped)\r\n")
        user.until(b"The conversation is forgotten.")
        user.until(b"\n> ")
        user.type(b"p\r")
        assert b"forget the conversation" in user.until(b"\n> ")
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0


def test_ctrl_d_during_an_answer_ends_the_chat_after_it():
    with chat() as user:
        user.until(PROMPT)
        ask(user, b"hello")
        user.type(CTRL_D + CTRL_C)
        user.until(b"\n(stopped)\r\n")
        assert user.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("moment", ["loading", "answering"])
def test_keys_of_the_wrong_moment_are_shown_after_the_next_prompt(moment):
    """They are not mixed with a progress bar or an answer, and are not lost."""
    load_time = 2 if moment == "loading" else 0
    with chat("--max-tokens", "300", load_time=load_time) as user:
        if moment == "loading":
            user.until(b"loading\r\n")
        else:
            user.until(PROMPT)
            ask(user, b"hello")
        assert not user.settings() & termios.ECHO
        user.type(b"/help\r")
        before = user.until(PROMPT)
        assert b"/help" not in before.replace(b"/help lists", b"")
        assert b"forget the conversation" in user.until(b"\n> ")
        user.type(CTRL_D)
        assert user.process.wait(PATIENCE) == 0


def test_a_terminal_is_as_it_was_after_sigterm():
    with chat(load_time=1000) as user:
        user.until(b"loading\r\n")
        assert not user.settings() & termios.ECHO
        user.process.terminate()
        assert user.process.wait(PATIENCE) == 143
        assert user.settings() & termios.ECHO


SERVER = """
import sys
from functools import partial

import trio

from trioengine import EngineConfig
from trioengine.serve import ServeConfig, serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour

async def main():
    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery, behaviours=[Behaviour(load_time=0, step_time=0.02)])
        config = ServeConfig(port=int(sys.argv[1]))
        server = await nursery.start(partial(serve, EngineConfig(model="toy"), config, ports=simulation.ports))
        print(server.port, flush=True)

trio.run(main)
"""


@contextmanager
def server(port=0):
    """A server that is a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_chat_of_a_pipe_ends_with_its_server():
    """Its reader could not tell an answer that is begun again from a whole one."""
    with server() as (process, port):
        options = ("--ignore-eos", "--temperature", "0", "--max-tokens", "400")
        command = [sys.executable, "-m", "trioengine.cli", "chat", "--connect", f"http://127.0.0.1:{port}", *options]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes) as chat:
            chat.stdin.write(b"hello\nagain\n")
            chat.stdin.flush()
            assert chat.stdout.read(1)
            process.kill()
            said, complaints = chat.communicate(timeout=PATIENCE)
    assert (b"\n" in said, chat.returncode) == (False, 1)
    assert complaints.startswith(b"trioengine: error: the connection to the server broke off")


def test_a_chat_goes_on_with_its_conversation_after_the_server_was_killed():
    lost = b"\r\ntrioengine: error: the connection to the server broke off: the server died, or the network failed"
    kept = b"(Enter sends the message again, over a new connection; the conversation is kept)\r\n> hello"
    with server() as (process, port):
        options = ("--ignore-eos", "--temperature", "0", "--max-tokens", "200")
        address = f"http://127.0.0.1:{port}"
        with on_a_terminal("-m", "trioengine.cli", "chat", "--connect", address, *options, columns=200) as user:
            user.until(PROMPT)
            ask(user, b"hello")
            process.kill()
            process.wait()  # its sockets are closed: the listening one, too
            user.until(lost)
            user.until(kept)
            user.type(b" again\\\r")
            user.until("… ".encode())
            user.type(b"and now?\r")
            user.until(b"connection refused")
            user.until(kept + b" again\\")
            with server(port):
                user.type(b"\r")
                user.until("… and now?".encode())
                ask(user, b"")
                user.type(CTRL_C)
                user.until(b"\n(stopped)\r\n> ")
                user.type(CTRL_D)
                assert user.process.wait(PATIENCE) == 0
