"""What the tests of the worker share."""

import importlib.util
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"


def module_of(name):
    """A module of tests/data, which a script without pytest uses, too."""
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_llama():
    return module_of("tiny_llama")


@pytest.fixture(scope="session")
def tiny_smolvlm():
    return module_of("tiny_smolvlm")


@pytest.fixture
def prompt(tiny_llama):
    return tiny_llama.PROMPT


@pytest.fixture
def path(tiny_llama, tmp_path):
    return tiny_llama.write(tmp_path / "plain", "plain")
