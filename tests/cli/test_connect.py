"""`trioengine chat --connect`: a process that talks to a server, which is on a simulated worker."""

import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import trio

from trioengine import EngineConfig
from trioengine.cli.app import run
from trioengine.serve import ServeConfig, serve
from trioengine.testing import Simulation
from trioengine.testing.simulated_worker import Behaviour


@contextmanager
def served(**options):
    """A server in a thread; its URL, and a dictionary whose `statistics` are the engine's when it has ended."""
    started, told = threading.Event(), {}

    async def main():
        async with trio.open_nursery() as workers, trio.open_nursery() as nursery:
            simulation = Simulation(workers, behaviours=[Behaviour(load_time=0, step_time=0)])
            config = EngineConfig(model="toy", max_num_seqs=8)
            server = await nursery.start(_serve, config, ServeConfig(port=0, **options), simulation.ports)
            await server.engine.ready()
            told.update(server=server, token=trio.lowlevel.current_trio_token(), scope=workers.cancel_scope)
            started.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert started.wait(60)
    try:
        yield f"ws://127.0.0.1:{told['server'].port}", told["server"].engine
    finally:
        told["token"].run_sync_soon(told["scope"].cancel)
        thread.join()


async def _serve(config, serve_config, ports, *, task_status):
    await serve(config, serve_config, ports=ports, task_status=task_status)


def chat(url, *options, lines="hello\nand then?\n\n"):
    command = [sys.executable, "-m", "trioengine.cli", "chat", "--connect", url, "--temperature", "0", *options]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=False)


def test_a_chat_with_a_server():
    with served(api_key=("secret",)) as (url, engine):
        answered = chat(url, "--api-key", "secret", "--max-tokens", "3", "--ignore-eos")
        assert (answered.returncode, answered.stderr) == (0, "")
        assert [len(line) for line in answered.stdout.splitlines()] == [3, 3]
        assert engine.statistics().finished == 2
        refused = chat(url, "--api-key", "wrong")
        assert (refused.returncode, refused.stderr) == (2, "trioengine: error: this key is not accepted (--api-key)\n")
        refused = chat(url)
        assert refused.returncode == 2
        assert refused.stderr.startswith("trioengine: error: this needs a key")
        assert refused.stderr.endswith(" (--api-key)\n")


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
        ("ws://127.0.0.1:1", 1, "cannot connect to 127.0.0.1:1"),
        ("somewhere", 2, "error: --connect must be an address like ws://"),
    ],
)
def test_no_server(capsys, url, exit_code, said):
    assert run(["chat", "--connect", url]) == exit_code
    assert said in capsys.readouterr().err
