"""`trioengine chat --connect`: a process that talks to a server, which is on a simulated worker."""

import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
from helpers.operated import served

from trioengine.cli.app import run


def command(url, *options):
    return [sys.executable, "-m", "trioengine", "chat", "--connect", url, "--temperature", "0", *options]


def chat(url, *options, lines="hello\nand then?\n\n"):
    run = partial(subprocess.run, capture_output=True, text=True, timeout=120, check=False)
    return run(command(url, *options), input=lines)


@contextmanager
def chatting(url, *options):
    """A running chat, whose output is read meanwhile."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command(url, *options), text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_chat_with_a_server():
    with served(api_key=("secret",)) as (url, engine):
        answered = chat(url, "--api-key", "secret", "--max-tokens", "3", "--ignore-eos")
        assert (answered.returncode, answered.stderr) == (0, "")
        assert [len(line) for line in answered.stdout.splitlines()] == [3, 3]
        assert engine.statistics().finished == 2
        refused = chat(url, "--api-key", "wrong")
        assert (refused.returncode, refused.stderr) == (2, "trioengine: error: this key is not accepted (--api-key)\n")
        refused = chat(url)
        assert (refused.returncode, refused.stderr) == (2, "trioengine: error: this needs a key (--api-key)\n")


def test_a_chat_waits_for_an_engine_that_sleeps(capsys):
    with served() as (url, _):
        assert run(["sleep", "--connect", url]) == 0
        with chatting(url, "--max-tokens", "3", "--ignore-eos") as process:
            process.stdin.write("hello\n\n")
            process.stdin.flush()
            remedy = "a message waits until it is awake: trioengine wake"
            assert process.stderr.readline() == f"trioengine: the engine is sleeping; {remedy}\n"
            assert run(["wake", "--connect", url]) == 0
            said, complaints = process.communicate(timeout=120)
            assert (len(said), complaints, process.returncode) == (4, "trioengine: the engine is awake\n", 0)


@pytest.mark.parametrize("how", ["closed", "broken"])
def test_a_chat_without_a_stderr_goes_on_when_the_engine_sleeps(capsys, how):
    """`closed`: as by `2>&-`; `broken`: its reader has closed the pipe."""
    with served() as (url, _):
        shell = ["sh", "-c", 'exec "$@" 2>&-', "sh"] if how == "closed" else []
        reading, writing = os.pipe()
        os.close(reading)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": writing}
        with subprocess.Popen([*shell, *command(url, "--max-tokens", "3", "--ignore-eos")], text=True, **pipes) as chat:
            os.close(writing)
            chat.stdin.write("hello\n")
            chat.stdin.flush()
            assert len(chat.stdout.readline()) == 4
            for change in ("sleep", "wake"):  # the chat gets both notices before its next answer
                assert run([change, "--connect", url]) == 0
            said, _ = chat.communicate("again\n\n", timeout=60)
        assert (said[-1:], chat.returncode) == ("\n", 0)


def test_a_chat_says_that_an_answer_was_cut_off(capsys):
    with served(step_time=0.02) as (url, _), chatting(url, "--max-tokens", "400", "--ignore-eos") as process:
        process.stdin.write("hello\n\n")
        process.stdin.flush()
        process.stdout.read(1)
        assert run(["sleep", "--connect", url]) == 0
        said, complaints = process.communicate(timeout=120)
        assert len(said) < 400 and process.returncode == 0
        assert "trioengine: the answer was cut off (sleep)\n" in complaints


def test_a_chat_whose_answer_was_cut_off_goes_on_without_a_stderr(capsys):
    with served(step_time=0.02) as (url, _):
        reading, writing = os.pipe()
        os.close(reading)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": writing}
        with subprocess.Popen(command(url, "--max-tokens", "400", "--ignore-eos"), text=True, **pipes) as chat:
            os.close(writing)
            chat.stdin.write("hello\nagain\n\n")
            chat.stdin.flush()
            chat.stdout.read(1)
            assert run(["sleep", "--connect", url]) == 0
            assert run(["wake", "--connect", url]) == 0
            said, _ = chat.communicate(timeout=60)
        assert (said.count("\n"), chat.returncode) == (2, 0)


def test_what_is_no_key(capsys, monkeypatch):
    """Such as the keys of a server, which has several in its variable."""
    assert run(["chat", "--connect", "ws://127.0.0.1:1", "--api-key", "ü"]) == 2
    assert "error: --api-key must be one key of visible ASCII characters" in capsys.readouterr().err
    monkeypatch.setenv("TRIOENGINE_API_KEY", "one two")
    for command in (["chat", "--connect", "ws://127.0.0.1:1"], ["bench", "serve"]):
        assert run(command) == 2
        assert "error: TRIOENGINE_API_KEY must be one key of visible ASCII characters" in capsys.readouterr().err


IGNORED = [
    (["--connect", "ws://127.0.0.1:1", "--max-num-seqs", "4"], {}, "--max-num-seqs is not for --connect"),
    (["--no-enable-prefix-caching"], {"CONNECT": "ws://127.0.0.1:1"}, "is not for TRIOENGINE_CONNECT"),
    (["--api-key", "secret"], {}, "--api-key is for --connect"),
]


@pytest.mark.parametrize(("options", "variables", "said"), IGNORED)
def test_an_option_that_would_be_ignored_is_refused(capsys, monkeypatch, options, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(f"TRIOENGINE_{name}", value)
    assert run(["chat", *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error


def test_a_variable_for_other_commands_is_not(capsys, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_MAX_NUM_SEQS", "4")
    assert run(["chat", "--connect", "ws://127.0.0.1:1"]) == 1
    assert "cannot connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "exit_code", "said"),
    [
        (
            "ws://127.0.0.1:1",
            1,
            "cannot connect to http://127.0.0.1:1: connection refused; is 'trioengine serve' running there?\n",
        ),
        ("somewhere", 2, "error: --connect must be an address like http://localhost:8000 or ws://"),
        ("http://a..b:1", 2, "error: --connect must be an address like http://localhost:8000 or ws://"),
    ],
)
def test_no_server(capsys, url, exit_code, said):
    assert run(["chat", "--connect", url]) == exit_code
    assert said in capsys.readouterr().err
