"""CUDA graphs: the answers of steps that are run kernel by kernel, and no graph of memory that has gone."""

import random

import pytest
import torch
from helpers import tiny_decoders
from helpers.torch_driver import generate, load, needs_cuda

from trioengine.core.power import ALL_TAGS
from trioengine.core.sampling_params import ResolvedParams

VARIANTS = ["gemma3", "qwen3", "olmo2", "phi3", "granite"]


@pytest.fixture(autouse=True)
def _cuda():
    needs_cuda()


@pytest.fixture(params=VARIANTS)
def path(request, tmp_path):
    return tiny_decoders.write(tmp_path, request.param)


@pytest.fixture
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(200) for _ in range(rng.randrange(1, 90))] for _ in range(21)]


def load_on_gpu(path, **config):
    return load(path, device="cuda", kv_cache_memory=8 << 20, max_num_seqs=32, **config)


def record_all(runner):
    count = 0
    while runner.prepare():
        count += 1
    return count


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_answers(path, prompts, cache_dtype):
    """Recorded when they are needed, and beforehand; with preemption."""
    config = {"kv_cache_dtype": cache_dtype}
    expected, _ = generate(load_on_gpu(path, **config, cuda_graphs="none"), prompts, 30)
    runner = load_on_gpu(path, **config)
    assert runner.info.kernels == "triton"
    assert generate(runner, prompts, 30)[0] == expected
    assert record_all(runner) > 0
    limits = {"max_num_batched_tokens": 60, "chunked_prefill_size": 25, "kv_blocks_total": 12, "max_num_seqs": 32}
    found, statistics = generate(runner, prompts, 30, **limits)
    assert found == expected
    assert statistics.num_preemptions > 0


def test_drawn_answers(path, prompts):
    params = ResolvedParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
    runner = load_on_gpu(path)
    expected, _ = generate(load_on_gpu(path, cuda_graphs="none"), prompts, 12, params)
    assert generate(runner, prompts, 12, params)[0] == expected


def test_all_sizes_are_recorded_once(path):
    runner = load_on_gpu(path)
    assert record_all(runner) == 7  # 1, 2, 4, 8, 16, 24, 32
    assert not runner.prepare()
    assert record_all(load_on_gpu(path, cuda_graphs="none")) == 0


@pytest.mark.parametrize("discards", [False, True])
def test_after_sleep(path, prompts, discards):
    runner = load_on_gpu(path)
    expected, _ = generate(runner, prompts, 12)
    record_all(runner)
    before, cache_bytes = torch.cuda.memory_allocated(), sum(layer.nbytes for layer in runner.cache.layers)
    runner.sleep()
    assert not runner.prepare(), "a graph of a cache that sleeps"
    assert before - torch.cuda.memory_allocated() >= cache_bytes
    if discards:
        runner.update_weights(str(path))
    runner.wake(ALL_TAGS)
    assert generate(runner, prompts, 12)[0] == expected
    assert record_all(runner) > 0
    assert generate(runner, prompts, 12)[0] == expected


def test_after_new_weights(tmp_path, prompts):
    first, second = (tiny_decoders.write(tmp_path / name, "qwen3") for name in ("first", "second"))
    file = second / "model.safetensors"
    change_weights(file)
    runner = load_on_gpu(first)
    record_all(runner)
    runner.update_weights(str(second))
    expected, _ = generate(load_on_gpu(second, cuda_graphs="none"), prompts, 12)
    assert generate(runner, prompts, 12)[0] == expected
    assert generate(load_on_gpu(first), prompts, 12)[0] != expected


def change_weights(file):
    from safetensors.torch import load_file, save_file

    save_file({name: tensor * 1.1 + 0.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("variant", ["lfm2", "qwen3_5", "qwen3-moe"])
def test_a_model_that_waits_for_the_gpu_is_not_recorded(tmp_path, prompts, variant):
    path = tiny_decoders.write(tmp_path, variant)
    runner = load_on_gpu(path)
    assert runner.info.kernels == "triton"
    assert not runner.prepare()
    assert generate(runner, prompts, 12)[0] == generate(load_on_gpu(path, kernels="torch"), prompts, 12)[0]
