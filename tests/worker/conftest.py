"""What the tests of the worker share."""

from pathlib import Path

import helpers.tiny_llama
import helpers.tiny_smolvlm
import pytest
import torch

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def tiny_llama():
    return helpers.tiny_llama


@pytest.fixture(scope="session")
def tiny_smolvlm():
    return helpers.tiny_smolvlm


@pytest.fixture
def prompt(tiny_llama):
    return tiny_llama.PROMPT


@pytest.fixture
def path(tiny_llama, tmp_path):
    return tiny_llama.write(tmp_path / "plain", "plain")


@pytest.fixture
def one_thread():
    """Beside other processes, threads that wait for each other take long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
