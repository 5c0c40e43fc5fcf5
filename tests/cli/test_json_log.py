"""`serve --log-json`: every line on stderr is a JSON object, from the first to the last, however the server ends."""

import json
import logging
import os
import signal
import subprocess
import sys
import warnings

import pytest
import trio

from trioengine.cli.errors import Stderr
from trioengine.cli.logs import configure_logs, log_what_python_prints, logged_workers


def serve(*arguments, environment=None):
    return subprocess.Popen(
        [sys.executable, "-m", "trioengine", "serve", *arguments],
        stderr=subprocess.PIPE,
        env=os.environ | (environment or {}),
        text=True,
    )


def records(lines):
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in found)
    return found


REFUSALS = [
    (["--nope"], 2, "unknown option --nope"),
    (["--max-num-seqs", "0"], 2, "--max-num-seqs must be"),
    (["--log-level", "loud"], 2, "log-level must be debug"),
    (["--config", "/no/such.toml"], 2, "/no/such.toml: No such file"),
    (["/no/such/file.gguf"], 1, "no such file"),
    (["--host", "0.0.0.0"], 2, "--host 0.0.0.0 is reachable"),
]


@pytest.mark.parametrize(("arguments", "exit_code", "message"), REFUSALS)
def test_refusals(arguments, exit_code, message):
    with serve(*arguments, environment={"TRIOENGINE_LOG_JSON": "1"}) as process:
        (refusal,) = records(process.stderr)
    assert process.returncode == exit_code
    assert (refusal["level"], refusal["logger"]) == ("error", "trioengine")
    assert message in refusal["message"]


def test_a_value_that_is_refused_does_not_ask_for_it():
    with serve(environment={"TRIOENGINE_LOG_JSON": "maybe"}) as process:
        refusal = process.stderr.read()
    assert "trioengine: error: TRIOENGINE_LOG_JSON must be true or false, got 'maybe'" in refusal


def test_a_file_may_ask_for_it(tmp_path):
    (tmp_path / "file.toml").write_text("log-json = true\nport = 70000")
    environment = {"TRIOENGINE_PROT": "80"}
    with serve("--config", str(tmp_path / "file.toml"), environment=environment) as process:
        typo, refusal = records(process.stderr)
    assert (typo["level"], typo["message"]) == (
        "warning",
        "no option has the variable TRIOENGINE_PROT; did you mean 'TRIOENGINE_PORT'?",
    )
    assert "port must be an integer" in refusal["message"]


FILES = [
    ('log-json = true\nport = "80"', [], 2, "port must be an integer, got '80'"),
    ("log_json = true\nprot = 80", [], 2, "'prot' is not an option of this command"),
    ("log-json = true", ["--nope"], 2, "unknown option --nope"),
    ("log-json = true", ["--port", "many"], 2, "--port must be an integer"),
]


@pytest.mark.parametrize("way", ["flag", "flag with =", "variable"])
@pytest.mark.parametrize(("text", "arguments", "exit_code", "message"), FILES)
def test_refusals_when_a_file_asks_for_it(tmp_path, text, arguments, exit_code, message, way):
    path = tmp_path / "file.toml"
    path.write_text(text)
    flags = {"flag": ["--config", str(path)], "flag with =": [f"--config={path}"], "variable": []}[way]
    environment = {"TRIOENGINE_CONFIG": str(path)} if way == "variable" else {}
    with serve(*flags, *arguments, environment=environment) as process:
        (refusal,) = records(process.stderr)
    assert process.returncode == exit_code
    assert message in refusal["message"]


def test_a_variable_beats_the_file(tmp_path):
    path = tmp_path / "file.toml"
    path.write_text('log-json = true\nport = "80"')
    with serve("--config", str(path), environment={"TRIOENGINE_LOG_JSON": "0"}) as process:
        assert process.stderr.read().startswith("trioengine: error: config file ")


def test_without_it_there_is_text(tmp_path):
    with serve("--port", "70000", environment={"TRIOENGINE_LOG_JSON": "0"}) as process:
        assert process.stderr.read().startswith("trioengine: error: --port must be")


def test_a_file_whose_name_is_too_long_is_refused_as_text():
    with serve("--config", "x" * 5000, environment={"TRIOENGINE_LOG_JSON": ""}) as process:
        lines = process.stderr.readlines()
    assert (process.returncode, len(lines)) == (2, 1)
    assert lines[0].startswith("trioengine: error: config file x") and lines[0].endswith(": File name too long\n")


def test_a_bug_has_its_traceback(capsys):
    stderr = Stderr(as_json=True)
    try:
        raise ZeroDivisionError("oh\nno")
    except ZeroDivisionError as exc:
        stderr.fail("internal error", exc)
    (record,) = records(capsys.readouterr().err.splitlines())
    assert record["exception"].startswith("Traceback")


def test_a_server_from_its_start_to_its_end(tmp_path, smollm2):
    """Python's warnings and the worker's own lines are records as well."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, warnings\n"
        "if 'trioengine.worker' in sys.orig_argv:\n"
        "    print('INFO: from the worker', file=sys.stderr)\n"
        "    print('a library\\nsays this', file=sys.stderr)\n"
        "    sys.stderr.flush()\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "TRIOENGINE_HOME": str(tmp_path / "home")}
    with serve(str(smollm2), "--port", "0", "--log-json", environment=environment) as process:
        found = []
        for line in process.stderr:
            found += records([line])
            if found[-1]["message"].startswith("ready: "):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    messages = [record["message"] for record in found]
    own = [record["message"] for record in found if record["logger"] == "trioengine"]
    assert own[0].startswith("listening on ")
    assert own[1] == f"loading {smollm2}"
    assert messages[-1] == "stopped"
    of_the_worker = [(r["level"], r["message"]) for r in found if r["logger"] == "trioengine.worker"]
    assert of_the_worker[:3] == [("info", "from the worker"), ("warning", "a library"), ("warning", "says this")]
    ready = next(index for index, message in enumerate(messages) if message.startswith("ready: "))
    if "native" in messages[ready]:
        assert messages.index("compiling the CPU kernels for this model and machine") < ready


def test_the_last_lines_of_a_worker_that_cannot_start(tmp_path, smollm2):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'trioengine.worker' in sys.orig_argv:\n    os.write(2, b'no torch'); os._exit(3)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with serve(str(smollm2), "--port", "0", "--log-json", environment={"PYTHONPATH": path}) as process:
        found = records(process.stderr)
    assert process.returncode == 1
    assert ("warning", "no torch") in [(record["level"], record["message"]) for record in found]
    assert found[-1]["level"] == "error"


@pytest.fixture
def hooks(monkeypatch):
    """The places where Python prints are as they were after the test."""
    monkeypatch.setattr("threading.excepthook", None)
    monkeypatch.setattr(sys, "unraisablehook", None)
    monkeypatch.setattr(sys, "excepthook", None)
    yield
    logging.captureWarnings(False)


def test_warnings_and_exceptions_that_nothing_caught(hooks, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logs("info", as_json=True)
    log_what_python_prints()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    error = ZeroDivisionError("oh")
    sys.excepthook(ZeroDivisionError, error, None)
    warning, uncaught = records(capsys.readouterr().err.splitlines())
    assert "DeprecationWarning: old" in warning["message"]
    assert uncaught["message"] == "ZeroDivisionError in the main thread"
    assert "ZeroDivisionError: oh" in uncaught["exception"]


async def test_long_lines_and_a_worker_that_outlives_its_end(caplog, autojump_clock):
    caplog.set_level(logging.INFO, "trioengine")
    async with logged_workers() as ports:
        writable = os.dup(ports.spawn_worker.keywords["stderr"])
        os.write(writable, b"x" * (1 << 16))
        await trio.testing.wait_all_tasks_blocked()
        os.write(writable, b"y" * 10 + b"\n\nINFO: \xff\nlast")
    os.close(writable)
    assert [len(message) for message in caplog.messages[:1]] == [(1 << 16) + 10]
    assert caplog.messages[1:] == ["\\xff", "last"]
