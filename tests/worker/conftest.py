"""What the tests of the worker share."""

import importlib.util
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def tiny_llama():
    """tests/data/tiny_llama.py, which a script without pytest uses, too."""
    spec = importlib.util.spec_from_file_location("tiny_llama", DATA / "tiny_llama.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_llama"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prompt(tiny_llama):
    return tiny_llama.PROMPT


@pytest.fixture
def path(tiny_llama, tmp_path):
    return tiny_llama.write(tmp_path / "plain", "plain")
