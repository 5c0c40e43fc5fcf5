"""The help of the commands: how it is asked for, its contents, and a command line without arguments."""

import re
import subprocess
import sys

import pytest

from trioengine import __version__
from trioengine.cli.app import run
from trioengine.hub.known_models import KNOWN_MODELS


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__
    assert run(["--help"]) == 0
    assert "serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [
        (["-h"], "trioengine [OPTIONS] COMMAND [ARGS]..."),
        (["help"], "trioengine [OPTIONS] COMMAND [ARGS]..."),
        (["serve", "-h"], "trioengine serve [OPTIONS] [model]"),
        (["help", "serve"], "trioengine serve [OPTIONS] [model]"),
        (["help", "bench", "serve"], "trioengine bench serve [OPTIONS]"),
        (["bench", "help"], "trioengine bench [OPTIONS] COMMAND [ARGS]..."),
    ],
)
def test_other_ways_to_the_help(capsys, arguments, usage):
    assert run(arguments) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Usage: {usage}"


def test_the_help_shows_choices(capsys):
    assert run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for metavar in ("--kernels <auto|native|triton|torch>", "--on-worker-loss <resume|fail>", "--api-key <str>"):
        assert metavar in shown
    assert "list[" not in shown


@pytest.mark.parametrize("command", [["pull"], ["serve"], ["generate"]])
def test_the_help_lists_the_known_models(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "400")  # lines also break at hyphens
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in KNOWN_MODELS if name not in shown] == []


def test_help_loads_neither_trio_nor_torch():
    program = """
import sys
from trioengine.cli.app import run
from trioengine.cli.bench.config import BenchConfig
run(["--help"])
run(["serve", "--help"])
sys.exit(",".join({"trio", "torch", "numpy", "rich", "tokenizers"} & sys.modules.keys()) or 0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("command", [["serve"], ["generate"], ["chat"], ["bench", "offline"], ["bench", "serve"]])
def test_help_shows_a_file_with_an_option_that_the_command_has(capsys, command):
    assert run([*command, "--help"]) == 0
    shown = re.sub(r"(?<=\w)-\s+", "-", " ".join(capsys.readouterr().out.split()))  # lines also break at hyphens
    name = shown.partition("with any of these options, as ")[2].partition(" = ")[0]
    assert f"--{name} " in shown


def test_help_says_what_a_chat_does_at_an_interrupt(capsys):
    assert run(["chat", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Ctrl+C stops an answer, and the part that came stays in the conversation" in shown


@pytest.mark.parametrize("command", [[], ["bench"]])
@pytest.mark.parametrize("columns", ["80", "50"])
def test_help_shows_the_summaries_of_commands_whole(capsys, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert run([*command, "--help"]) == 0
    summaries = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert max(map(len, summaries)) <= int(columns)
    assert not [line for line in summaries if "..." in line or "…" in line]
    assert columns == "50" or all(line.endswith(".") for line in summaries if line)  # one line each


def test_help_says_what_bench_does(capsys):
    assert run(["bench", "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]
    assert run(["bench", "offline", "--help"]) == 0
    caching = capsys.readouterr().out.partition("--enable-prefix-caching")[2].partition("\n  --")[0]
    assert " ".join(caching.split()).endswith("find them computed. [default: False]")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_temperature_is_among_the_first_options(capsys, command):
    assert run([command, "--help"]) == 0
    shown = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert shown.index("--temperature") < 8
    assert shown.index("--temperature") < shown.index("--device")


def test_options_are_in_panels(capsys):
    assert run(["serve", "--help"]) == 0
    shown = re.findall(r"^(?:(\w[\w ]+):$|  --([a-z-]+))", capsys.readouterr().out, re.MULTILINE)
    panels, panel = {}, ""
    for title, option in shown:
        panel = title or panel
        panels.setdefault(panel, []).extend([option] if option else [])
    titles = ["Arguments", "Options", "Model", "Batching and cache", "Network", "Security", "Limits", "Worker"]
    assert list(panels) == titles, "a new option needs a panel in cli/help.py"
    assert {"api-key", "admin-key", "insecure"} <= set(panels["Security"])
    assert {"host", "port"} <= set(panels["Network"])
    assert {"device", "dtype"} <= set(panels["Model"])
    assert {"max-connections", "max-sessions"} <= set(panels["Limits"])


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
