"""How long OpenMP's threads spin in a worker: as libgomp itself says when torch has loaded it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOADS = """
from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.worker.__main__ import load
try:
    load(WorkerConfig("/nowhere"), print)
except ModelError:
    pass
"""


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "4000"),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "0"),
    ],
)
def test_threads_that_wait_spin_for_a_moment_only(given: dict[str, str], spins: str) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    finished = subprocess.run(
        [sys.executable, "-c", LOADS],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"} | given,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = [line.split("=")[1].strip(" '") for line in finished.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    assert said == [spins]
