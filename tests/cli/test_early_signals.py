"""Signals before a command does its work: while it is loaded, and while it fetches the model."""

import os
import signal
import subprocess
import sys
import time

import pytest

END_WHILE_IT_IS_LOADED = """
import os, signal, sys

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.{name})

signal.signal(signal.SIGINT, {handler})
sys.meta_path.insert(0, Slow())
from trioengine.cli import main

main()
"""


@pytest.mark.parametrize(
    ("name", "handler", "exit_code"),
    [
        ("SIGINT", "signal.default_int_handler", 130),
        ("SIGTERM", "signal.default_int_handler", 143),
        ("SIGTERM", "signal.SIG_IGN", 143),
    ],
)
def test_a_signal_while_it_is_loaded(name, handler, exit_code):
    program = END_WHILE_IT_IS_LOADED.format(name=name, handler=handler)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (exit_code, b"")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("command", [["pull"], ["generate", "hi"]])
def test_sigterm_while_a_model_is_fetched(tmp_path, command, handler):
    """pip is ended and its files are removed, whether SIGINT is ignored or not."""
    pip = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "sitecustomize.py").write_text(f"import os, sys, time\nif 'pip' in sys.orig_argv:\n    {pip}\n")
    home = tmp_path / "home"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "trioengine", *command],
        env=os.environ | {"PYTHONPATH": path, "TRIOENGINE_HOME": str(home)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    try:
        while not ((tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text())):
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 143
        (shown,) = process.stderr.read().splitlines()
        assert shown.startswith("fetching the model")
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert list(home.iterdir()) == []
