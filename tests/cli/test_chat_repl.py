"""`trioengine chat` on a terminal: a process of its own, on a simulated worker."""

import os
import pty
import re
import subprocess
import sys

import pytest
from helpers.terminal_chats import CHAT, CTRL_D, PATIENCE, PROMPT, chat


@pytest.mark.parametrize("end", [b"/bye\r", b"/exit\r", b"/quit\r", CTRL_D])
def test_a_message_of_several_lines_help_and_the_end(end):
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(b"one \\\r")
        user.until("… ".encode())
        user.type(b"two\r")
        user.until(b"\n> ")
        user.type(b"/help\r")
        assert b"/reset" in user.until(b"\n> ")
        user.leave(end)


def test_a_message_that_cannot_be_answered():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(b"x" * 3000 + b"\\\r")
        user.until("… ".encode())
        user.type(b"\xff\r")
        user.until(b"trioengine: error: prompt is not UTF-8")
        user.until(b"\n> ")
        user.leave()


def test_a_chat_begins_with_the_model_and_the_way_to_help():
    with chat("toy") as user:
        first = b"toy: /help lists the commands, /bye or Ctrl+D ends the chat"
        assert user.until(PROMPT).splitlines()[1] == first


def test_an_answer_that_reaches_the_limit_shows_it():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(b"hello\r")
        user.until(b"(--max-tokens 3 reached)")
        user.until(b"\n> ")
        user.leave()


def test_an_empty_line_does_nothing():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        for line in (b"\r", b"  \r"):
            user.type(line)
            assert user.until(PROMPT) == line.replace(b"\r", b"\r\n") + PROMPT
        user.type(b"hello\r")
        assert len(user.until(b"\n> ").splitlines()[1]) == 3
        user.leave(b"/bye\r")


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
        user.leave()
    lines = shown.decode().splitlines()
    assert "unknown command" in shown.decode()
    assert max(map(len, lines)) <= 25
    words = set(shown.decode().split())
    assert {"commands,", "conversation", "conversation.", "trioengine:", "'/nonesuch';", "forgotten."} <= words


@pytest.mark.parametrize("command", [b"/hlp", b"/", b"/reset everything", b"/quite"])
def test_an_unknown_command_is_not_sent_to_the_model(command):
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(command + b"\r")
        refused = user.until(b"\n> ")
        assert b"trioengine: error: unknown command '" + command + b"'; /help lists the commands" in refused
        user.leave()


@pytest.mark.parametrize("message", [b"/etc/hosts: for what?", b" /help"])
def test_a_path_and_a_line_that_begins_with_a_space_are_messages(message):
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(message + b"\r")
        shown = user.until(b"\n> ")
        assert b"unknown command" not in shown
        assert b"forget the conversation" not in shown
