"""The command line as a module, and without arguments."""

import subprocess
import sys

import pytest

from trioengine import __version__
from trioengine.cli.app import run


def test_python_m_trioengine():
    command = [sys.executable, "-m", "trioengine", "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(("arguments", "name"), [([], "generate"), (["bench"], "offline")])
def test_without_arguments_the_help_is_printed(capsys, arguments, name):
    assert run(arguments) == 2
    without = capsys.readouterr()
    assert run([*arguments, "--help"]) == 0
    with_help = capsys.readouterr()
    assert name in without.out
    assert without == with_help
