"""Sleep, wake and other weights: the same tokens as ever, or the new weights'; and what fails changes nothing."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from test_weights import write_gguf
from torch_driver import DATA, generate, load

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import InvariantError, ModelError
from trioengine.core.tag import ALL_TAGS, Tag
from trioengine.worker.layers import linear
from trioengine.worker.models.llama import LlamaModel, wanted_tensors
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.weights import open_checkpoint
from trioengine.worker.weights.host_copy import HostCopy
from trioengine.worker.weights.reader import WeightReader

EXPECTED = json.loads((DATA / "tiny_reference.json").read_text())["plain"]["output"]
WEIGHTS, KV_CACHE = frozenset({Tag.WEIGHTS}), frozenset({Tag.KV_CACHE})
KV_BYTES = 4 << 20
ORDERS = {"at once": [ALL_TAGS], "weights first": [WEIGHTS, KV_CACHE], "kv_cache first": [KV_CACHE, WEIGHTS]}


@pytest.fixture
def prompt(tiny_llama):
    return tiny_llama.PROMPT


@pytest.fixture
def path(tiny_llama, tmp_path):
    return tiny_llama.write(tmp_path / "plain", "plain")


@pytest.fixture
def other(tiny_llama, tmp_path):
    """Weights of the same shape, with other answers."""
    return tiny_llama.write(tmp_path / "other", "plain", seed=1)


@pytest.fixture
def runner(path):
    return load(path, kv_cache_memory=KV_BYTES)


@pytest.fixture
def address_space():
    """A function that leaves the process so many bytes of address space, until the test ends."""
    limits = resource.getrlimit(resource.RLIMIT_AS)

    def leave(spare):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, limits[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_AS, limits)


class FailingProgress:
    """Loading fails once so many bytes are read: as a disk would."""

    def __init__(self):
        self.fail_after = None
        self.calls = 0

    def __call__(self, done, total):
        self.calls += 1
        if self.fail_after is not None and done > self.fail_after:
            raise OSError("the disk is gone")


def answer(runner, prompt):
    (tokens,), statistics = generate(runner, [prompt], 48)
    assert statistics.num_tokens == len(prompt) + 47
    return tokens


def facts(runner):
    return (
        runner.model_type,
        runner.device,
        runner.dtype,
        runner.vocab_size,
        runner.max_model_len,
        runner.kv_blocks_total,
        runner.block_size,
    )


def asleep(runner):
    """The tags that sleep, as the refusals say."""
    tags = set()
    for tag, attribute in ((Tag.WEIGHTS, "model"), (Tag.KV_CACHE, "cache")):
        try:
            getattr(runner, attribute)
        except InvariantError:
            tags.add(tag)
    return tags


def fall_asleep(runner, level):
    """At level 2 no memory has the weights, as after an update of what sleeps."""
    runner.sleep()
    if level == 2:
        runner.update_weights(runner._weights._path)


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
        assert len(runner.cache.layers[0]) == runner.kv_blocks_total


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


def test_other_weights_and_back(runner, path, other, prompt):
    others = answer(load(other), prompt)
    assert others != EXPECTED
    for _ in range(2):
        runner.update_weights(str(other))
        assert answer(runner, prompt) == others
        runner.update_weights(str(path))
        assert answer(runner, prompt) == EXPECTED


@pytest.mark.parametrize("level", [1, 2])
def test_other_weights_while_asleep(runner, path, other, prompt, level):
    """They are loaded at wake, and no sooner."""
    others = answer(load(other), prompt)
    fall_asleep(runner, level)
    runner.update_weights(str(other))
    assert asleep(runner) == ALL_TAGS
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == others
    fall_asleep(runner, level)
    runner.wake(KV_CACHE)
    runner.update_weights(str(path))
    assert asleep(runner) == WEIGHTS
    runner.wake(WEIGHTS)
    assert answer(runner, prompt) == EXPECTED


def test_other_weights_while_only_the_kv_cache_sleeps(runner, other, prompt):
    fall_asleep(runner, 1)
    runner.wake(WEIGHTS)
    runner.update_weights(str(other))
    assert asleep(runner) == KV_CACHE
    runner.wake(KV_CACHE)
    assert answer(runner, prompt) == answer(load(other), prompt)


def test_the_same_weights_in_another_format(tiny_llama, runner, tmp_path, prompt):
    """GGUF rounds the numbers of the configuration."""
    runner.update_weights(str(write_gguf(tiny_llama, tmp_path / "plain.gguf", "plain")))
    assert answer(runner, prompt) == EXPECTED


@pytest.mark.parametrize("max_model_len", [200, None])
def test_a_shorter_context_must_hold_what_is_in_use(tiny_llama, tmp_path, path, prompt, max_model_len):
    runner = load(path, kv_cache_memory=KV_BYTES, max_model_len=max_model_len)
    shorter = tiny_llama.write(tmp_path / "shorter", "plain", max_position_embeddings=200)
    if max_model_len is None:
        with pytest.raises(ModelError, match="has a context of 200 tokens, and 256 are in use"):
            runner.update_weights(str(shorter))
    else:
        runner.update_weights(str(shorter))
        assert runner.max_model_len == 200
    assert answer(runner, prompt) == EXPECTED


UNFIT = {
    "vocab_size is 201, not 200": {"vocab_size": 201},
    "hidden_size is 96, not 48, .*head_dim is 16, not 8": {"hidden_size": 96},
    "num_layers is 2, not 3": {"num_hidden_layers": 2},
    "num_kv_heads is 3, not 2": {"num_key_value_heads": 3},
    "rope_theta is 500000.0, not 10000.0": {"rope_theta": 500000.0},
    "rms_norm_eps is 1e-06, not 1e-05": {"rms_norm_eps": 1e-6},
    "tie_word_embeddings is True, not False": {"tie_word_embeddings": True},
    "attention_bias is True, not False": {"attention_bias": True},
    "rope_scaling.kind is .*LINEAR.*, rope_scaling.factor is 4.0, not 1.0": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}
    },
}


@pytest.mark.parametrize("state", ["awake", "level 1", "level 2"])
@pytest.mark.parametrize(("message", "changes"), UNFIT.items(), ids=[",".join(changes) for changes in UNFIT.values()])
def test_weights_that_do_not_fit_change_nothing(tiny_llama, runner, tmp_path, prompt, message, changes, state):
    unfit = tiny_llama.write(tmp_path / "unfit", "plain", **changes)
    if state != "awake":
        fall_asleep(runner, int(state[-1]))
    model = runner.model if state == "awake" else None
    with pytest.raises(ModelError, match=message):
        runner.update_weights(str(unfit))
    if state == "awake":
        assert runner.model is model
    else:
        assert asleep(runner) == ALL_TAGS
        runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


def test_what_cannot_be_read_changes_nothing(tiny_llama, runner, tmp_path, prompt):
    model = runner.model
    for name, damage in DAMAGES.items():
        directory = tiny_llama.write(tmp_path / name, "plain")
        damage(directory)
        with pytest.raises(ModelError):
            runner.update_weights(str(directory))
    assert runner.model is model
    assert answer(runner, prompt) == EXPECTED


def another_architecture(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))


def truncated(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {"architecture": another_architecture, "truncated": truncated, "deleted": shutil.rmtree}


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
    with pytest.raises(ModelError, match="is another model: head_dim is 16, not 8, attention_bias is True"):
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
    runner = TorchModelRunner.load(WorkerConfig(str(path), dtype="float32", kv_cache_memory=KV_BYTES), progress)
    fall_asleep(runner, 2)
    progress.fail_after = 100_000
    with pytest.raises(ModelError, match="OSError: the disk is gone"):
        runner.wake(ALL_TAGS)
    assert asleep(runner) == ALL_TAGS
    progress.fail_after = None
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


def test_an_update_that_fails_half_way_brings_the_old_weights_back(path, other, prompt):
    class FailingOnce(FailingProgress):
        def __call__(self, done, total):
            try:
                super().__call__(done, total)
            except OSError:
                self.fail_after = None
                raise

    progress = FailingOnce()
    runner = TorchModelRunner.load(WorkerConfig(str(path), dtype="float32", kv_cache_memory=KV_BYTES), progress)
    progress.fail_after = 100_000
    with pytest.raises(ModelError, match="OSError: the disk is gone"):
        runner.update_weights(str(other))
    assert answer(runner, prompt) == EXPECTED
    fall_asleep(runner, 2)
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


def test_an_update_that_loses_both_is_no_model_error(path, other):
    """The worker cannot go on: a ModelError would say that the old weights are still there."""
    progress = FailingProgress()
    runner = TorchModelRunner.load(WorkerConfig(str(path), dtype="float32", kv_cache_memory=KV_BYTES), progress)
    progress.fail_after = 100_000
    with pytest.raises(RuntimeError, match="the disk is gone; and the old weights cannot be loaded again: OSError"):
        runner.update_weights(str(other))
    assert asleep(runner) == WEIGHTS


@pytest.mark.parametrize("asleep_too", [False, True])
def test_paths_that_the_system_refuses(runner, prompt, tmp_path, asleep_too):
    """They are no more than weights that cannot be read."""
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "config.json").write_text("[" * 100_000)
    if asleep_too:
        runner.sleep()
    for path in ("x" * 3000, str(deep)):
        with pytest.raises(ModelError):
            runner.update_weights(path)
    if asleep_too:
        runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED


@pytest.mark.parametrize("tags", [ALL_TAGS, WEIGHTS, KV_CACHE], ids=["all", "weights", "kv_cache"])
def test_a_start_asleep(path, prompt, tags):
    """What READY says is what it would say awake."""
    progress = FailingProgress()
    config = WorkerConfig(str(path), dtype="float32", kv_cache_memory=KV_BYTES, asleep=tuple(tags))
    runner = TorchModelRunner.load(config, progress)
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


def test_progress_is_told_whenever_weights_are_loaded(path, other):
    progress = FailingProgress()
    runner = TorchModelRunner.load(WorkerConfig(str(path), dtype="float32", kv_cache_memory=KV_BYTES), progress)
    seen = progress.calls
    runner.update_weights(str(other))
    assert progress.calls == 2 * seen
    fall_asleep(runner, 2)
    runner.wake(ALL_TAGS)
    assert progress.calls == 3 * seen
    fall_asleep(runner, 1)
    runner.wake(ALL_TAGS)
    assert progress.calls == 3 * seen


# ---- weights moved to host memory, as on a GPU -----------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["plain", "tied", "bias"])
def test_a_model_runs_on_after_its_weights_were_moved(tiny_llama, tmp_path, monkeypatch, variant):
    """Without oneDNN's own layout a layer holds what the reader gave it, as on every device but the CPU."""
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)
    runner = load(tiny_llama.write(tmp_path, variant), kv_cache_memory=KV_BYTES)
    checkpoint = open_checkpoint(str(tmp_path))
    wanted = wanted_tensors(checkpoint.config)
    reader = WeightReader(checkpoint, wanted, torch.float32, torch.device("cpu"), lambda done, total: None)
    with torch.inference_mode():
        model = LlamaModel(checkpoint.config, reader, 256)
    checkpoint.close()
    expected = answer(runner, tiny_llama.PROMPT)
    runner._weights._state = type(runner._weights._state)(model, reader.in_use())
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
    small, large = torch.ones(4), torch.full((128 << 20,), 7, dtype=torch.uint8)
    held = HostCopy([small, large])
    address_space(32 << 20)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        held.restore()
    assert small.untyped_storage().nbytes() == large.untyped_storage().nbytes() == 0
    address_space(4 << 30)
    held.restore()
    assert (small.tolist(), int(large.min()), int(large.max())) == ([1, 1, 1, 1], 7, 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("level", [1, 2])
def test_on_cuda(path, prompt, level):
    """The device's memory is free while the worker sleeps."""
    unused = torch.cuda.memory_reserved()
    runner = load(path, device="cuda", kv_cache_memory=256 << 20)
    assert answer(runner, prompt) == EXPECTED
    fall_asleep(runner, level)
    assert torch.cuda.memory_reserved() < unused + (64 << 20)
    runner.wake(ALL_TAGS)
    assert answer(runner, prompt) == EXPECTED
