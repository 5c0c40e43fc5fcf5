"""Damaged and lying model files are refused by a ModelError, or loaded, with little memory and time."""

import subprocess
import sys
from pathlib import Path

import pytest

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
