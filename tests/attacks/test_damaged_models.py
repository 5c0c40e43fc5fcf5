"""Damaged and lying model files are refused by a ModelError, or loaded, with little memory and time."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.small_models import CONFIG, write_directory

from trioengine import EngineConfig, ModelError, open_engine
from trioengine.actors.ports import Ports
from trioengine.hub.checkpoint import HF_ARCHITECTURES

CHILD = Path(__file__).with_name("model_mutants.py")
LAST_RESORT = 3600  # seconds; the child bounds its processor time itself


def faults(*arguments):
    """The faults that the child reports, and the mutant that it died of, if it died."""
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LAST_RESORT)
    lines = child.stdout.splitlines()
    found = [line for line in lines if ": " in line]
    if child.returncode != 0:
        found.append(f"{lines[-1:]} ended the process ({child.returncode}): {child.stderr[-2000:]}")
    return found


SLOW = [pytest.param(first, first + 1000, marks=pytest.mark.slow) for first in range(0, 10_000, 1000)]


@pytest.mark.parametrize(("first", "last"), [(0, 400), *SLOW])
def test_mutants_are_refused_or_loaded(first, last):
    """No exception but ModelError, 64 MB of memory, 30 s of processor time; to replay one: model_mutants.py N N+1."""
    assert faults(first, last) == []


def test_files_that_lie_about_their_size():
    assert faults("lies") == []


async def test_a_file_that_lies_is_refused_before_a_worker_starts(tmp_path):
    """And so are bad fields: torch is not imported for them."""
    spawned = []

    async def spawn_worker():
        spawned.append(True)
        raise OSError("none is wanted")

    write_directory(tmp_path / "model")
    for changes, message in (
        (
            {"num_hidden_layers": 2**31 - 1},
            "num_hidden_layers must be at most the number of tensors, 21, got 2147483647",
        ),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number above 0 and at most 3.4e+38, got '1e-5'"),
        (
            {"model_type": "mamba", "vocab_size": None},
            f"model_type 'mamba' is not supported; supported: {', '.join(HF_ARCHITECTURES)}",
        ),
    ):
        (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | changes))
        with pytest.raises(ModelError) as caught:
            async with open_engine(
                EngineConfig(model=str(tmp_path / "model")), ports=replace(Ports(), spawn_worker=spawn_worker)
            ):
                pass
        assert str(caught.value) == f"{tmp_path / 'model' / 'config.json'}: {message}"
    assert spawned == []
