"""What the tests of the worker share."""

from pathlib import Path

import helpers.tiny_llama
import helpers.tiny_smolvlm
import pytest
import torch
from helpers.torch_driver import backend, needs_compiler

from trioengine.worker.kernels import torch_kernels
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.torch_kernels import TorchKernels

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


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=["torch", None, "AVX2", "0"])
def kernels(request, dtype):
    """Kernels of a model with 4 heads, 2 of keys and values: torch's, and those in C++ by instructions at most."""
    if request.param == "torch":
        return TorchKernels(4, dtype)
    needs_compiler()
    return NativeKernels(4, 2, 16, dtype, 16, request.param)


def on_one_thread():
    """Beside other processes, threads that wait for each other take long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


one_thread = pytest.fixture(on_one_thread)
module_on_one_thread = pytest.fixture(on_one_thread, scope="module")
