"""What the tests of the worker share."""

from pathlib import Path

import helpers.tiny_llama
import helpers.tiny_smolvlm
import pytest
import torch
from helpers.torch_driver import backend

from trioengine.worker.kernels import torch_kernels

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


@pytest.fixture(params=["native", "fused", "products", "cuda"])
def options(request, monkeypatch):
    """Options of `load`: kernels in C++, and torch's, of which the fused one is for large prefills and for CUDA."""
    if request.param in ("native", "cuda"):
        return backend(request.param)
    monkeypatch.setattr(torch_kernels, "_SCORES_BYTES", 0 if request.param == "fused" else 1 << 20)
    return backend("torch")


def on_one_thread():
    """Beside other processes, threads that wait for each other take long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


one_thread = pytest.fixture(on_one_thread)
module_on_one_thread = pytest.fixture(on_one_thread, scope="module")
