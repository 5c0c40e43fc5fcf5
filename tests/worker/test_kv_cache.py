"""The number of blocks of a GPU's KV cache, whose memory the weights share."""

import pytest
import torch
from helpers.torch_driver import load, needs_cuda

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.worker.runner.model_spec import ModelSpec

TOTAL = 10_000_000  # bytes
PER_BLOCK = 2 * 3 * 2 * 8 * 4 * 16  # keys and values, layers, heads, head size, float32, tokens


@pytest.fixture
def weights(tiny_llama):
    """Bytes."""
    return sum(tensor.nbytes for tensor in tiny_llama.tensors(tiny_llama.BASE).values())


@pytest.fixture
def in_use(monkeypatch):
    """A function that makes a GPU of TOTAL bytes, of which so many are in use."""

    def make(used):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - used, TOTAL))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    return make


def read(path, **config):
    return ModelSpec.read(WorkerConfig(str(path), device="cuda", dtype="float32", kernels="torch", **config))


@pytest.mark.parametrize(("share", "used"), [(0.9, 0), (0.5, 1_000_000)])
def test_the_weights_are_part_of_the_share(path, weights, in_use, share, used):
    in_use(used)
    spec = read(path, gpu_memory_utilization=share)
    assert spec.num_blocks == (int(TOTAL * share) - used - weights) // PER_BLOCK


def test_no_room_beside_the_weights(path, weights, in_use):
    in_use(8_900_000)
    message = (
        rf"cuda has no room for the KV cache: gpu_memory_utilization \(--gpu-memory-utilization\) is 0.9 of {TOTAL} "
        rf"bytes, of which 8900000 are in use, and the weights take {weights}"
    )
    with pytest.raises(ModelError, match=message):
        read(path)


def test_a_loaded_model_keeps_within_its_share(tiny_llama, tmp_path):
    needs_cuda()
    path = tiny_llama.write(tmp_path, "plain", hidden_size=768, intermediate_size=3072)
    _, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    runner = load(path, device="cuda", kv_cache_memory=None, gpu_memory_utilization=0.5)
    assert runner.info.kv_blocks_total > 0
    assert total // 4 < torch.cuda.memory_allocated() - allocated < total // 2
