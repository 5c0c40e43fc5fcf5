"""Sleep and wake: the same tokens as ever; and what fails changes nothing."""

import resource
import shutil
from pathlib import Path

import pytest
import torch
from helpers.sleeping_runner import (
    DAMAGES,
    EXPECTED,
    KV_BYTES,
    KV_CACHE,
    WEIGHTS,
    FailingProgress,
    answer,
    asleep,
    fall_asleep,
)
from helpers.torch_driver import generate, load, needs_cuda

from trioengine.core.errors import InvariantError, ModelError
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.worker.kernels import linear
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.models.llama import LlamaModel
from trioengine.worker.runner.model_weights import HostCopy
from trioengine.worker.weights import open_checkpoint
from trioengine.worker.weights.checkpoint import WeightReader

ORDERS = {"at once": [ALL_TAGS], "weights first": [WEIGHTS, KV_CACHE], "kv_cache first": [KV_CACHE, WEIGHTS]}


@pytest.fixture
def runner(path, device):
    return load(path, kv_cache_memory=KV_BYTES, device=device)


@pytest.fixture
def address_space():
    """A function that leaves the process so many bytes of address space, until the test ends."""
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def leave(spare):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_AS, limits)


def facts(runner):
    return (
        runner.info.model_type,
        runner.info.device,
        runner.info.dtype,
        runner.info.vocab_size,
        runner.info.max_model_len,
        runner.info.kv_blocks_total,
        runner.info.block_size,
    )


def assert_refuses(runner, prompt, what):
    with pytest.raises(InvariantError, match=f"a forward pass while the {what}"):
        generate(runner, [prompt], 1)


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
@pytest.mark.parametrize("levels", [[1], [2], [1, 1], [1, 2], [2, 1]], ids=str)
def test_the_same_tokens_after_sleep(runner, prompt, levels, order):
    assert answer(runner, prompt) == EXPECTED
    before = facts(runner)
    for _ in range(2):
        for level in levels:
            fall_asleep(runner, level)
            assert asleep(runner) == ALL_TAGS
        for tags in order:
            assert_refuses(runner, prompt, "weights sleep" if Tag.WEIGHTS in asleep(runner) else "KV cache sleeps")
            runner.wake(tags)
        assert answer(runner, prompt) == EXPECTED
        assert facts(runner) == before
        assert runner.cache.num_blocks == runner.info.kv_blocks_total + (runner.target.padding is not None)


def test_asleep_in_part_and_asleep_again(runner, prompt):
    fall_asleep(runner, 1)
    runner.wake(KV_CACHE)
    fall_asleep(runner, 2)
    runner.wake(WEIGHTS)
    fall_asleep(runner, 1)
    assert asleep(runner) == ALL_TAGS
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_dropped(runner, level):
    """Nobody holds on to the KV cache; at level 1 the weights stay where they are, and at level 2 go."""
    cache, model = runner.cache.layers[0].untyped_storage()._weak_ref(), runner.model
    fall_asleep(runner, level)
    assert torch.UntypedStorage._expired(cache)
    torch.UntypedStorage._free_weak_ref(cache)
    runner.wake(WEIGHTS)
    assert (runner.model is model) is (level == 1)


def test_a_wake_without_a_checkpoint(runner, path, tmp_path, prompt):
    """All stays asleep, the KV cache too; once the checkpoint is back, so is the model."""
    fall_asleep(runner, 2)
    path.rename(tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(ModelError, match="no model at"):
            runner.wake(ALL_TAGS)
        assert asleep(runner) == ALL_TAGS
    runner.wake(KV_CACHE)
    (tmp_path / "elsewhere").rename(path)
    runner.wake(WEIGHTS)
    assert answer(runner, prompt) == EXPECTED


def test_a_wake_that_finds_another_model(tiny_llama, runner, path, prompt):
    """What was checked at the update may be another file by now."""
    fall_asleep(runner, 2)
    shutil.rmtree(path)
    tiny_llama.write(path, "bias")
    with pytest.raises(ModelError, match="is another model: head_dim is 16, not 8, rotary_dim is 16, not 8, attent"):
        runner.wake(ALL_TAGS)
    assert asleep(runner) == ALL_TAGS
    shutil.rmtree(path)
    tiny_llama.write(path, "plain")
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_without_memory_for_the_kv_cache(path, prompt, address_space, level):
    runner = load(path, kv_cache_memory=512 << 20)
    assert answer(runner, prompt) == EXPECTED
    fall_asleep(runner, level)
    address_space(64 << 20)
    with pytest.raises(ModelError, match="bytes for the KV cache cannot be had on cpu"):
        runner.wake(ALL_TAGS)
    assert asleep(runner) == ALL_TAGS
    address_space(4 << 30)
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


def test_a_wake_that_fails_half_way(path, prompt):
    progress = FailingProgress()
    runner = load(path, kv_cache_memory=KV_BYTES, on_progress=progress)
    fall_asleep(runner, 2)
    progress.fail_after = 100_000
    with pytest.raises(ModelError, match="OSError: the disk is gone"):
        runner.wake(ALL_TAGS)
    assert asleep(runner) == ALL_TAGS
    progress.fail_after = None
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


@pytest.mark.parametrize("tags", [ALL_TAGS, WEIGHTS, KV_CACHE], ids=["all", "weights", "kv_cache"])
def test_a_start_asleep(path, prompt, tags):
    """What READY says is what it would say awake."""
    progress = FailingProgress()
    runner = load(path, kv_cache_memory=KV_BYTES, asleep=tuple(tags), on_progress=progress)
    assert facts(runner) == facts(load(path, kv_cache_memory=KV_BYTES))
    assert asleep(runner) == tags
    assert (progress.calls == 0) is (Tag.WEIGHTS in tags)
    runner.wake(tags)
    assert progress.calls > 0
    assert answer(runner, prompt) == EXPECTED


def test_a_start_asleep_takes_no_bad_checkpoint(tiny_llama, tmp_path):
    for name, damage in DAMAGES.items():
        directory = tiny_llama.write(tmp_path / name, "plain")
        damage(directory)
        with pytest.raises(ModelError):
            load(directory, asleep=tuple(ALL_TAGS))


def test_a_start_asleep_takes_no_memory(path):
    """Not even where it could not be had."""
    runner = load(path, kv_cache_memory=10**17, asleep=tuple(ALL_TAGS))
    with pytest.raises(ModelError, match="lower kv_cache_memory"):
        runner.wake(ALL_TAGS)
    assert asleep(runner) == ALL_TAGS
    runner.wake(WEIGHTS)
    assert asleep(runner) == KV_CACHE


# ---- weights moved to host memory, as on a GPU -----------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["plain", "tied", "bias"])
def test_a_model_runs_on_after_its_weights_were_moved(tiny_llama, tmp_path, monkeypatch, variant):
    """Without oneDNN's own layout a layer holds what the reader gave it, as on every device but the CPU."""
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)
    runner = load(tiny_llama.write(tmp_path, variant), kv_cache_memory=KV_BYTES, kernels="torch")
    checkpoint = open_checkpoint(str(tmp_path))
    wanted = checkpoint.config.wanted_tensors()
    reader = WeightReader(checkpoint, wanted, torch.float32, torch.device("cpu"), lambda done, total: None)
    with torch.inference_mode():
        model = LlamaModel(checkpoint.config, reader, TorchKernels(checkpoint.config.num_heads, torch.float32), 256)
    checkpoint.close()
    expected = answer(runner, tiny_llama.PROMPT)
    runner.target.weights._state = type(runner.target.weights._state)(model, reader.projections, reader.in_use())
    size = sum(tensor.untyped_storage().nbytes() for tensor in reader.in_use())
    assert size == sum(info.nbytes for name, info in checkpoint.tensors.items() if name in wanted)
    fall_asleep(runner, 1)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in reader.in_use())
    runner.wake(ALL_TAGS)
    assert runner.model is model
    assert answer(runner, tiny_llama.PROMPT) == expected


def test_views_of_one_storage_move_once():
    whole = torch.arange(10.0)
    alone = torch.ones(3)
    held = HostCopy([whole, whole[2:4], alone, torch.empty(0)])
    assert whole.untyped_storage().nbytes() == alone.untyped_storage().nbytes() == 0
    held.restore()
    assert (whole.tolist(), alone.tolist()) == (list(range(10)), [1, 1, 1])


def test_no_room_to_move_back(address_space):
    """Nothing is taken, and nothing is lost."""
    small, large = torch.ones(4), torch.full((1 << 30,), 7, dtype=torch.uint8)  # the heap has no such hole
    held = HostCopy([small, large])
    address_space(32 << 20)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        held.restore()
    assert small.untyped_storage().nbytes() == large.untyped_storage().nbytes() == 0
    address_space(4 << 30)
    held.restore()
    assert (small.tolist(), int(large.min()), int(large.max())) == ([1, 1, 1, 1], 7, 7)


@pytest.mark.parametrize("level", [1, 2])
def test_the_memory_of_a_gpu_is_free_while_the_worker_sleeps(tiny_llama, tmp_path, prompt, level):
    needs_cuda()
    runner = load(
        tiny_llama.write(tmp_path, "plain", hidden_size=768, intermediate_size=3072),
        device="cuda",
        kv_cache_memory=256 << 20,
    )
    weights = sum(tensor.nbytes for tensor in runner.target.weights._state.tensors)
    expected = answer(runner, prompt)
    for _ in range(2):
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        fall_asleep(runner, level)
        assert torch.cuda.memory_allocated() < allocated - weights - (255 << 20)
        assert torch.cuda.memory_reserved() < reserved - weights - (255 << 20)
        runner.wake(ALL_TAGS)
        assert answer(runner, prompt) == expected
