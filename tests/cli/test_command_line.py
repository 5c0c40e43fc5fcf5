"""Command lines and their results: exit codes, errors of one line, options made from the configuration."""

import dataclasses
import io
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from trioengine import EngineConfig, ModelError, SamplingParams, WorkerLost
from trioengine.cli import app as app_module
from trioengine.cli.app import run
from trioengine.cli.bench.config import BenchConfig

NOT_OPTIONS = {"model", "restart_delays", "logit_bias", "logprobs", "prompt_logprobs", "cache_salt", "grammar"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams)):
        monkeypatch.delenv(f"TRIOENGINE_{field.name.upper()}", raising=False)


BAD = [
    (["nope"], 2, "error: unknown command 'nope'. See trioengine --help.\n"),
    (["sevre"], 2, "error: unknown command 'sevre'; did you mean 'serve'? See trioengine --help.\n"),
    (["bench", "offlin"], 2, "error: unknown command 'offlin'; did you mean 'offline'? See trioengine bench --help.\n"),
    (["serve", "--nope"], 2, "error: unknown option --nope. See trioengine serve --help.\n"),
    (["serve", "--prot"], 2, "error: unknown option --prot; did you mean '--port'? See trioengine serve --help.\n"),
    (["serve", "--port"], 2, "error: --port needs a value. See trioengine serve --help.\n"),
    (["serve", "--insecure=1"], 2, "error: --insecure takes no value. See trioengine serve --help.\n"),
    (["serve", "--enable-prefix-caching=0"], 2, "takes no value; its opposite is --no-enable-prefix-caching. See"),
    (["serve", "--model", "toy"], 2, "error: unknown option --model; it is an argument: trioengine serve MODEL. See"),
    (
        ["generate", "hi", "--connect", "x"],
        2,
        "unknown option --connect; it is an option of chat, sleep, wake, status.",
    ),
    (["generate", "-hi"], 2, "error: unknown option -i; an argument that begins with - comes after --. See"),
    (["serve", "--kv-cache-memory", "4GiB"], 2, "--kv-cache-memory must be an integer (bytes), got '4GiB'. See"),
    (["version"], 2, "error: unknown command 'version'; did you mean '--version'? See trioengine --help.\n"),
    (["serve", "toy", "two"], 2, "error: unexpected argument 'two'. See trioengine serve --help.\n"),
    (["serve", "--port", "70000"], 2, "port must be an integer from 0 to 65535, got 70000"),
    (
        ["serve", "--max-num-seqs", "many"],
        2,
        "--max-num-seqs must be an integer, got 'many'. See trioengine serve --help.\n",
    ),
    (["serve", "--max-num-seqs", "m" * 1000], 2, "mmm…. See trioengine serve --help.\n"),
    (
        ["fuzz", "--profile", "lazy"],
        2,
        "error: --profile must be quick or deep, got 'lazy'. See trioengine fuzz --help.\n",
    ),
    (["serve", "--max-num-seqs", "0"], 2, "error: --max-num-seqs must be an integer from 1"),
    (
        ["serve", "--max-num-seqs", "4096"],
        2,
        "error: --max-num-batched-tokens (2048) must be at least --max-num-seqs (4096)",
    ),
    (["serve", "--dtype", "float13"], 2, "error: --dtype must be"),
    (["serve", "--host", "0.0.0.0"], 2, "error: --host 0.0.0.0 is reachable from other machines, and no key is set"),
    (["serve", "--api-key", "two words"], 2, "error: --api-key must be keys of visible ASCII characters; they are not"),
    (
        ["serve", "--allowed-origin", "*"],
        2,
        "--allowed-origin must be origins such as https://example.com, got '*'\n",
    ),
    (["serve", "--log-level", "loud"], 2, "--log-level must be debug, info, warning or error, got 'loud'."),
    (["serve", "--config", "/no/such.toml"], 2, "error: config file /no/such.toml: No such file or directory"),
    (["fuzz", "--config", "x"], 2, "--config"),
    (["serve", "/no/such/file.gguf"], 1, "'/no/such/file.gguf': no such file"),
    (["serve", "--host", "a..b", "--insecure"], 1, "cannot listen on a..b:8000"),
    (["serve", "--max-connections", "0"], 2, "error: --max-connections must be an integer from 1"),
    (["generate"], 2, "missing argument 'prompt'. See trioengine generate --help."),
    (["generate", " "], 2, "prompt is empty"),
    (["generate", "hi", "--temperature", "-1"], 2, "temperature"),
    (["generate", "hi", "--max-tokens", "0"], 2, "error: --max-tokens must be"),
    (["generate", "hi", "--model", "no-such-model"], 1, "no-such-model"),
    (["generate", "hi", "--model", "/no/such/file.gguf"], 1, "/no/such/file.gguf"),
    (["chat", "no-such-model"], 1, "no-such-model"),
    (["pull", "no-such-model"], 1, "no-such-model"),
    (["pull", ""], 1, "empty"),
    (["bench", "offline", "--requests", "0"], 2, "error: --requests must be an integer of at least 1, got 0. See"),
    (
        ["sleep", "--level", "3"],
        2,
        "error: --level must be an integer from 1 to 2, got 3. See trioengine sleep --help.",
    ),
    (
        ["sleep", "--timeout", "soon"],
        2,
        "error: --timeout must be a number, got 'soon'. See trioengine sleep --help.\n",
    ),
    (["generate", "hi", "--stop-token-ids", "a"], 2, "error: --stop-token-ids must be an integer, got 'a'. See"),
    (["bench", "offline", "no-such-model"], 1, "no-such-model"),
    (["bench", "serve", "--num-prompts", "0"], 2, "--num-prompts"),
    (["bench", "serve", "--goodput", "ttft:200", "tpot"], 2, "--goodput must be"),
    (["bench", "serve", "--goodput", "ttft:200", "ttfx:300"], 2, "--goodput must be"),
    (["bench", "serve", "http://127.0.0.1:1"], 2, "unexpected argument 'http://127.0.0.1:1': a server is --base-url"),
    (["bench", "serve", "localhost:1"], 2, "unexpected argument 'localhost:1': a server is --base-url"),
    (["bench", "serve", "--goodput", "ttft:9", "http://a"], 2, "unexpected argument 'http://a': a server is --base"),
    (
        ["bench", "serve", "--goodput", "ttft"],
        2,
        "--goodput must be one METRIC:MILLISECONDS each of ttft, tpot, itl, e",
    ),
    (["bench", "serve", "ttft:200"], 2, "error: unexpected argument 'ttft:200': use --goodput ttft:200. See"),
    (
        ["generate", "hi", "there"],
        2,
        "unexpected argument 'there'; quote a prompt of several words, and name a model by --model",
    ),
    (["serve", "--hepl"], 2, "error: unknown option --hepl; did you mean '--help'? See trioengine serve --help.\n"),
    (
        ["status", "--connect", "http://localhost:99999"],
        2,
        "error: --connect must have a port from 1 to 65535, got 'http://localhost:99999'\n",
    ),
    (["bench", "serve", "some"], 2, "error: unexpected argument 'some'. See trioengine bench serve --help.\n"),
    (["bench", "serve", "--plot", "x.gif"], 2, "--plot must be a file that ends in .svg or .png"),
    (
        ["bench", "serve", "--base-url", "http://127.0.0.1:1"],
        1,
        "error: cannot connect to http://127.0.0.1:1: connection refused",
    ),
]


@pytest.mark.parametrize(("arguments", "exit_code", "named"), BAD)
def test_a_mistake_is_one_line(capsys, arguments, exit_code, named):
    assert run(arguments) == exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("trioengine: error: ")
    assert printed.err.count("\n") == 1
    assert named in printed.err


def test_a_variable_that_no_option_has_is_named_before_a_mistake(capsys, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_PROMPT", "hello")
    assert run(["generate"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("trioengine: warning: no option has the variable TRIOENGINE_PROMPT")
    assert error.startswith("trioengine: error: missing argument 'prompt'")


def test_standard_output_without_room_is_named():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "trioengine", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (
        1,
        "trioengine: error: cannot write to standard output: No space left on device\n",
    )


def test_the_server_takes_the_descriptors_that_it_may(descriptors):
    descriptors(100)
    assert run(["serve", "--host", "a..b", "--insecure"]) == 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


@pytest.mark.parametrize(
    ("arguments", "sources"),
    [
        (["serve"], [EngineConfig]),
        (["generate"], [EngineConfig, SamplingParams]),
        (["chat"], [EngineConfig, SamplingParams]),
        (["bench", "offline"], [EngineConfig]),
        (["bench", "serve"], [BenchConfig]),
    ],
)
def test_every_field_is_an_option(capsys, arguments, sources):
    assert run([*arguments, "--help"]) == 0
    shown = capsys.readouterr().out
    for source in sources:
        for field in dataclasses.fields(source):
            if field.name not in NOT_OPTIONS:
                assert "--" + field.name.replace("_", "-") in shown


def flags(command):
    """The options of a command and of those below it; all but the ones that print and exit."""
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.is_eager:
            yield parameter
    for below in getattr(command, "commands", {}).values():
        yield from flags(below)


def test_every_flag_has_its_variable():
    found = {parameter.opts[0]: parameter.envvar for parameter in flags(typer.main.get_command(app_module.app))}
    assert {"--shutdown-timeout", "--json", "--repeat", "--model", "--max-tokens", "--block-size"} <= found.keys()
    assert found == {flag: "TRIOENGINE_" + flag[2:].replace("-", "_").upper() for flag in found}


class Seen(Exception):
    """Ends a command where its work would begin."""


@pytest.fixture
def configured(monkeypatch):
    """Runs `generate` up to the point where everything is read, and gives the config and the parameters."""
    seen = []

    def stop(config, prompt, params, *, as_json):
        seen.append((config, prompt, params))
        raise Seen

    monkeypatch.setattr("trioengine.cli.generate.print_answer", stop)

    def configured(*arguments):
        assert run(["generate", *arguments]) == 1
        return seen.pop()

    return configured


def test_without_options_the_defaults_count(configured):
    config, prompt, params = configured("hi")
    assert (config, prompt, params) == (EngineConfig(), "hi", SamplingParams())


def test_options_have_their_types(configured):
    config, _, params = configured(
        *("hi", "--model", "m", "--max-num-seqs", "7", "--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching"),
        *("--temperature", "0", "--stop", "a", "--stop", "b", "--stop-token-ids", "3", "--seed", "-1", "--ignore-eos"),
    )
    assert config == EngineConfig("m", max_num_seqs=7, gpu_memory_utilization=0.5, enable_prefix_caching=False)
    assert params == SamplingParams(temperature=0, stop=("a", "b"), stop_token_ids=(3,), seed=-1, ignore_eos=True)


def test_the_command_line_beats_the_environment(configured, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_MODEL", "theirs")
    monkeypatch.setenv("TRIOENGINE_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("TRIOENGINE_BLOCK_SIZE", "32")
    config, _, _ = configured("hi", "--max-num-seqs", "6")
    assert config == EngineConfig("theirs", max_num_seqs=6, block_size=32)


ENDS = [
    (KeyboardInterrupt(), 130, ""),
    (BaseExceptionGroup("", [ExceptionGroup("", [ValueError("no")]), KeyboardInterrupt()]), 130, ""),
    (ModelError("bad\nmodel"), 1, "trioengine: error: bad model\n"),
    (ExceptionGroup("", [WorkerLost("gone")]), 1, "trioengine: error: gone\n"),
    (PermissionError(13, "Permission denied", "/x"), 1, "trioengine: error: [Errno 13] Permission denied: '/x'\n"),
    (ZeroDivisionError("oh"), 1, "trioengine: error: internal error: ZeroDivisionError: oh\n"),
]


@pytest.mark.parametrize(("error", "exit_code", "printed"), ENDS, ids=range(len(ENDS)))
def test_whatever_is_raised(monkeypatch, capsys, error, exit_code, printed):
    def fail(**options):
        raise error

    monkeypatch.setattr(app_module, "app", fail)
    assert run([]) == exit_code
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(("prompt", "stdin"), [("-", b"caf\xe9"), (b"caf\xe9", b"")])
def test_a_prompt_that_is_not_utf8(prompt, stdin):
    command = [sys.executable, "-m", "trioengine", "generate", prompt]
    ended = subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert ended.stderr == b"trioengine: error: prompt is not UTF-8\n"


WITH_NOTHING_OPEN = """
import os, subprocess, sys
from trioengine.cli import _open_missing

_open_missing()
print("nothing reads this", file=sys.stderr, flush=True)
assert sys.stdin.read() == ""
child = [sys.executable, "-c", "import os; os.dup2(2, 1)"]  # as the worker does
sys.exit(subprocess.run(child, stdin=subprocess.DEVNULL).returncode)
"""


@pytest.mark.parametrize("arguments", [["-m", "trioengine", "--version"], ["-c", WITH_NOTHING_OPEN]])
@pytest.mark.parametrize("closed", [(0, 1, 2), (0,), (1,), (2,)])
def test_standard_descriptors_that_are_closed(arguments, closed):
    def close():
        for fd in closed:
            os.close(fd)

    command = [sys.executable, *arguments]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, preexec_fn=close, timeout=60, check=False)
    assert ended.returncode == 0


def test_the_last_newline_of_stdin_is_no_part_of_the_prompt(configured, monkeypatch):
    monkeypatch.setattr("trioengine.cli.generate.read_all", io.StringIO("What…?\n\n").read)
    assert configured("-")[1] == "What…?\n"


def test_the_log_is_silent_unless_it_is_configured():
    program = "import logging, trioengine; logging.getLogger('trioengine').warning('the worker ended')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("variable", "arguments", "expected"),
    [(None, [], False), ("1", [], True), (None, ["--enable-prefix-caching"], True)],
)
def test_bench_uses_no_prefix_cache_unless_told(monkeypatch, variable, arguments, expected):
    configs = []
    monkeypatch.setattr(
        "trioengine.cli.bench.offline.bench_offline", lambda config, *work, **how: configs.append(config)
    )
    if variable is not None:
        monkeypatch.setenv("TRIOENGINE_ENABLE_PREFIX_CACHING", variable)
    assert run(["bench", "offline", *arguments]) == 0
    assert [config.enable_prefix_caching for config in configs] == [expected]


def test_hints_name_packages_that_exist():
    """trioengine itself is in no index under this name."""
    sources = Path(app_module.__file__).parents[1].rglob("*.py")
    assert [path for path in sources if re.search(r"pip install '?trioengine", path.read_text())] == []


def test_pull_refuses_a_file_that_is_no_model(capsys, tmp_path):
    path = tmp_path / "no.gguf"
    path.write_bytes(b"hello")
    assert run(["pull", str(path)]) == 1
    assert capsys.readouterr().err == f"trioengine: error: {path}: not a GGUF file: it does not begin with GGUF\n"
    path.write_bytes(b"GGUF")
    assert run(["pull", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
