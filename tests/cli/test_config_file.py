"""Options from a file and from the environment: precedence, and the errors for bad ones."""

import dataclasses
from pathlib import Path

import pytest

from trioengine import EngineConfig
from trioengine.cli.app import run
from trioengine.cli.sources import read_config_file
from trioengine.serve.config import ServeConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServeConfig)):
        monkeypatch.delenv(f"TRIOENGINE_{field.name.upper()}", raising=False)


@pytest.fixture
def file(tmp_path):
    """Writes a file of options, and gives its path."""

    def write(text):
        path = tmp_path / "trioengine.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


@pytest.fixture
def served(monkeypatch):
    """Runs `serve` up to the point where all options are read, and returns them."""
    seen = []

    def note(config, serve_config, **how):
        seen.append((config, serve_config, how))

    monkeypatch.setattr("trioengine.cli.serve.run_server", note)

    def served(*arguments):
        assert run(["serve", *arguments]) == 0
        return seen.pop()

    return served


FILE = """
model = "toy"
max-num-seqs = 16
gpu_memory_utilization = 1
enable-prefix-caching = false
host = "::1"
api-key = ["one", "two"]
admin_key = "three"
shutdown_timeout = 1.5
log-json = true
"""


def test_a_file_has_options(served, file):
    config, serve_config, how = served("--config", file(FILE))
    assert config == EngineConfig("toy", max_num_seqs=16, gpu_memory_utilization=1.0, enable_prefix_caching=False)
    expected = ServeConfig(host="::1", api_key=("one", "two"), admin_key=("three",), shutdown_timeout=1.5)
    assert serve_config == expected
    assert how == {"log_level": "info", "log_json": True}


def test_the_command_line_beats_the_environment_beats_the_file(served, file, monkeypatch):
    path = file('port = 1\nmax_num_seqs = 1\nblock_size = 4\nmodel = "file"\napi_key = "file"')
    monkeypatch.setenv("TRIOENGINE_CONFIG", path)
    monkeypatch.setenv("TRIOENGINE_PORT", "2")
    monkeypatch.setenv("TRIOENGINE_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("TRIOENGINE_API_KEY", "two keys")
    config, serve_config, _ = served("line", "--port", "3")
    assert (config.model, config.max_num_seqs, config.block_size) == ("line", 2, 4)
    assert (serve_config.port, serve_config.api_key) == (3, ("two", "keys"))


def test_a_variable_that_is_empty_is_none(served, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_API_KEY", "")
    assert served()[1] == ServeConfig()


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["bench", "offline"]])
def test_other_commands_take_one_too(capsys, file, command):
    path = file("max_num_seqs = 0")
    assert run([*command, "--config", path]) == 2
    assert capsys.readouterr().err.startswith(
        f"trioengine: error: config file {path}: max_num_seqs must be an integer from 1"
    )


BAD = [
    ("colour = 1", "'colour' is not an option of this command"),
    ("max-num-seq = 1", "'max-num-seq' is not an option of this command; did you mean 'max-num-seqs'?"),
    ("max_num_seq = 1", "'max_num_seq' is not an option of this command; did you mean 'max_num_seqs'?"),
    ("prompt = 'x'", "'prompt' is not an option of this command"),
    ("config = 'x'", "'config' is not an option of this command"),
    ("[server]\nport = 1", "'server' is a table; options stand at the top, in no table"),
    ("max-num-seqs = 1\nmax_num_seqs = 1", "max_num_seqs is given twice, also as max-num-seqs"),
    ("port = '80'", "port must be an integer, got '80'"),
    ("port = true", "port must be an integer"),
    ("port = 80.0", "port must be an integer"),
    ("shutdown-timeout = '1'", "shutdown-timeout must be a number"),
    ("insecure = 1", "insecure must be true or false"),
    ("host = 5", "host must be a string"),
    ("host = ['a', 'b']", "host must be a string"),
    ("api_key = 12345", "api_key must be a string"),
    ("api_key = ['a', 12345]", "api_key must be a string, or a list of them"),
    ("log-level = 5", "log-level must be a string"),
    ("port = 70000", "port must be an integer from 0 to 65535, got 70000"),
    ("api-key = 'two words'", "api-key must be keys of visible ASCII characters; they are not shown here"),
    ("port = ", "not TOML: Invalid value (at line 1, column 8)"),
    ("port = 1\nport = 2", "not TOML: Cannot overwrite a value (at line 2, column 9)"),
    (b"host = '\xff'", "not UTF-8"),
    ("port = " + "[" * 100_000, "not TOML: "),
]


@pytest.mark.parametrize(("text", "problem"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_refused_by_file_and_name(capsys, file, text, problem):
    path = file(text)
    assert run(["serve", "--config", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"trioengine: error: config file {path}: {problem}")
    assert said.count("\n") == 1
    assert "12345" not in said


def test_what_only_the_option_knows_is_said_in_the_same_words(capsys, file, monkeypatch):
    path = file("log-level = 'loud'")
    assert run(["serve", "--config", path]) == 2
    said = capsys.readouterr().err
    assert f"error: config file {path}: log-level must be debug, info, warning or error, got 'loud'." in said
    monkeypatch.setenv("TRIOENGINE_PORT", "many")
    assert run(["serve"]) == 2
    assert "error: TRIOENGINE_PORT must be an integer, got 'many'." in capsys.readouterr().err
    monkeypatch.setenv("TRIOENGINE_PORT", "0")
    monkeypatch.setenv("TRIOENGINE_INSECURE", "perhaps")
    assert run(["serve"]) == 2
    assert "error: TRIOENGINE_INSECURE must be true or false, got 'perhaps'." in capsys.readouterr().err


def test_what_is_found_later_is_said_in_the_same_words(capsys, file):
    path = file("host = '0.0.0.0'")
    assert run(["serve", "--config", path, "toy.gguf"]) == 1  # the model is looked for first
    capsys.readouterr()
    assert run(["serve", "--config", path]) == 2
    assert capsys.readouterr().err.startswith(f"trioengine: error: config file {path}: host 0.0.0.0 is reachable")


def test_an_error_names_the_variable(capsys, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_MAX_NUM_SEQS", "0")
    assert run(["serve"]) == 2
    assert capsys.readouterr().err.startswith("trioengine: error: TRIOENGINE_MAX_NUM_SEQS must be an integer from 1")


def test_two_fields_at_odds_are_both_named(capsys, file):
    path = file("max-num-batched-tokens = 4")
    assert run(["serve", "--config", path, "--max-num-seqs", "5"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"trioengine: error: config file {path}: max-num-batched-tokens (4) must be at least --max-num-seqs (5)"
    )


def test_insecure_and_a_key_are_both_named(capsys, file, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_API_KEY", "secret")
    assert run(["serve", "--insecure"]) == 2
    problem = "serves all clients without a key, and"
    said = f"trioengine: error: --insecure {problem} TRIOENGINE_API_KEY is set: give one of them\n"
    assert capsys.readouterr().err == said
    path = file("insecure = true\nadmin-key = 'secret'")
    monkeypatch.delenv("TRIOENGINE_API_KEY")
    assert run(["serve", "--config", path]) == 2
    assert capsys.readouterr().err.startswith(
        f"trioengine: error: config file {path}: insecure {problem} config file {path}: admin-key is set"
    )


def test_keys_are_not_shown(file):
    config = read_config_file(Path(file("api_key = 'secret'")), {"api_key": list[str]})
    assert "secret" not in repr(config)
    assert config.values == {"api_key": ["secret"]}


def test_a_key_that_is_no_text_is_not_shown(capsys):
    assert run(["serve", "--api-key", "sk-\udcff"]) == 2
    assert "sk-" not in capsys.readouterr().err


def test_a_variable_with_a_typo_is_reported(capsys, served, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("TRIOENGINE_NUM_PROMPTS", "4")  # for another command
    monkeypatch.setenv("TRIOENGINE_HOME", "/tmp")
    monkeypatch.setenv("TRIOENGINE_ZZZ", "4")
    assert served()[0] == EngineConfig()
    assert capsys.readouterr().err.splitlines() == [
        "trioengine: warning: no option has the variable TRIOENGINE_MAX_NUM_SEQ; "
        "did you mean 'TRIOENGINE_MAX_NUM_SEQS'?",
        "trioengine: warning: no option has the variable TRIOENGINE_ZZZ",
    ]
