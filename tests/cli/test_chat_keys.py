"""The keys and signals of a chat on a terminal: which stop an answer or the chat, and that none is lost."""

import termios

import pytest
from helpers.terminal_chats import CTRL_C, CTRL_D, PATIENCE, PROMPT, ask, chat


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
        user.type(b"half a line")
        user.until(b"half a line")  # the editor shows it in a thread of its own, beside the notice
        user.type(CTRL_C)
        user.until(b"\n(press Ctrl+C again, or /bye, to leave)\r\n> half a line")
        user.type(CTRL_C)
        assert user.process.wait(PATIENCE) == 130
        assert user.settings() & (termios.ECHO | termios.ICANON) == termios.ECHO | termios.ICANON
        assert not before & termios.ICANON  # a line was edited


def test_editing_and_history():
    with chat("--max-tokens", "3") as user:
        user.until(PROMPT)
        user.type(b"/hlp\x1b[D\x1b[De\r")  # two to the left
        assert b"Ctrl+C stops" in user.until(b"\n> ")
        user.type(b"\x1b[A\r")  # the last line again
        assert b"Ctrl+C stops" in user.until(b"\n> ")
        user.leave()


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
        user.leave()


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


IMPORTING = """
import os, select, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "trioengine.cli.chat":
            os.write(1, b"importing\\n")
            select.select([0], [], [])

sys.meta_path.insert(0, Slow())
"""


def test_a_line_that_is_typed_while_the_program_is_imported_is_shown_once():
    with chat("--max-tokens", "3", before=IMPORTING) as user:
        user.until(b"importing\r\n")
        user.type(b"/reset\r")
        assert user.until(b"The conversation is forgotten.").count(b"/reset") == 1
        user.leave()


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
        user.leave()


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
        user.leave()


def test_a_terminal_is_as_it_was_after_sigterm():
    with chat(load_time=1000) as user:
        user.until(b"loading\r\n")
        assert not user.settings() & termios.ECHO
        user.process.terminate()
        assert user.process.wait(PATIENCE) == 143
        assert user.settings() & termios.ECHO
