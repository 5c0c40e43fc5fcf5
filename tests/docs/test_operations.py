"""The page for operators is complete, and its examples and recipes fit the server."""

import configparser
import dataclasses
import tomllib
from pathlib import Path

import pytest

from trioengine import EngineConfig
from trioengine.cli.app import run
from trioengine.serve.config import ConnectionLimits, ServeConfig
from trioengine.serve.realtime.connection import CLOSE_TIMEOUT

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operations.md").read_text()
ELSEWHERE = {"host", "port", "served_model_name"}  # in serve --help


@pytest.mark.parametrize("field", sorted({field.name for field in dataclasses.fields(ServeConfig)} - ELSEWHERE))
def test_every_option_of_the_server_is_there(field):
    assert "--" + field.replace("_", "-") in PAGE


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ConnectionLimits)])
def test_defaults_are_true(field):
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `--{field.replace('_', '-')}` "))
    limits = ServeConfig()
    larger = {"max_body_size": limits.largest_body, "max_message_size": limits.largest_message}
    value = larger[field](takes_images=False) if field in larger else getattr(limits, field)
    if field in larger:
        assert larger[field](takes_images=True) == 32 << 20
        assert "32 MiB where the model takes images" in row
    shown = {8 << 20: "8 MiB", 4 << 20: "4 MiB", 32 << 10: "32 KiB", 1 << 20: "1 Mi "}.get(value, f"{value:g} s")
    assert row.split("|")[2].strip().startswith(shown.strip())


def test_the_example_of_a_file_is_read(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("trioengine.cli.serve.run_server", lambda *configs, **how: seen.append(configs))
    example = PAGE.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "file.toml").write_text(example)
    assert run(["serve", "--config", str(tmp_path / "file.toml")]) == 0
    ((config, serve_config),) = seen
    assert config.max_num_seqs == tomllib.loads(example)["max-num-seqs"]
    assert len(serve_config.api_key) == 2


def test_systemd_waits_longer_than_the_server_drains():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(DOCS / "trioengine.service")
    service = unit["Service"]
    longest = ServeConfig().shutdown_timeout + 2 * CLOSE_TIMEOUT + EngineConfig().worker_shutdown_timeout
    assert int(service["TimeoutStopSec"]) > longest
    assert (service["Type"], service["KillMode"]) == ("exec", "mixed")
    assert service["ExecStart"].startswith("/opt/trioengine/bin/trioengine serve --config ")


def test_the_recipes_install_the_torch_that_the_package_needs():
    requirements = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (requirement for requirement in requirements if requirement.startswith("torch"))
    assert f'$TORCH_OPTIONS "{torch}"' in (DOCS / "Containerfile").read_text()
    assert f".venv/bin/pip install $TORCH_OPTIONS '{torch}'" in (DOCS.parent / "README.md").read_text()


def test_variables_that_the_recipes_set_are_options(monkeypatch):
    seen = []
    monkeypatch.setattr("trioengine.cli.serve.run_server", lambda *configs, **how: seen.append((configs, how)))
    monkeypatch.setenv("TRIOENGINE_LOG_JSON", "1")
    monkeypatch.setenv("TRIOENGINE_HOST", "0.0.0.0")
    assert run(["serve"]) == 0
    (((_, serve_config), how),) = seen
    assert serve_config.host == "0.0.0.0"
    assert how["log_json"]
