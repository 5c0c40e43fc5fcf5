"""Other weights, awake and asleep: from then on their tokens; and what fails changes nothing."""

from dataclasses import replace

import pytest
from helpers import tiny_decoders
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
from helpers.tiny_gguf import write_gguf
from helpers.torch_driver import load, needs_compiler

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.core.power import ALL_TAGS
from trioengine.worker.runner.model_spec import ModelSpec


@pytest.fixture
def other(tiny_llama, tmp_path):
    """Weights of the same shape, with other answers."""
    return tiny_llama.write(tmp_path / "other", "plain", seed=1)


@pytest.fixture
def runner(path, device):
    return load(path, kv_cache_memory=KV_BYTES, device=device)


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
    assert runner.update_weights(str(write_gguf(tiny_llama, tmp_path / "plain.gguf", "plain"))) == "none"
    assert answer(runner, prompt) == EXPECTED


def test_weights_that_are_stored_as_integers(tiny_llama, tmp_path, prompt):
    needs_compiler()
    names = [name for name in tiny_llama.tensors(tiny_llama.BASE) if "norm" not in name]
    shape = {"hidden_size": 96, "intermediate_size": 160}
    path = tiny_llama.write(tmp_path / "wide", "plain", **shape)
    other = write_gguf(tiny_llama, tmp_path / "wide.gguf", "plain", kinds=dict.fromkeys(names, "Q8_0"), **shape)
    runner = load(path, quantization="gguf")
    assert runner.info.quantization == "none"
    assert runner.update_weights(str(other)) == "gguf"
    assert answer(runner, prompt) == answer(load(other, quantization="gguf"), prompt)
    assert runner.update_weights(str(path)) == "none"


@pytest.mark.parametrize("max_model_len", [200, None])
def test_a_shorter_context_must_hold_what_is_in_use(tiny_llama, tmp_path, path, prompt, max_model_len):
    runner = load(path, kv_cache_memory=KV_BYTES, max_model_len=max_model_len)
    shorter = tiny_llama.write(tmp_path / "shorter", "plain", max_position_embeddings=200)
    if max_model_len is None:
        with pytest.raises(ModelError, match="has a context of 200 tokens, and 256 are in use"):
            runner.update_weights(str(shorter))
    else:
        runner.update_weights(str(shorter))
        assert runner.info.max_model_len == 200
    assert answer(runner, prompt) == EXPECTED


def test_a_refused_path_keeps_the_graphs(runner, tmp_path):
    graphs = runner.target._graphs = object()
    with pytest.raises(ModelError, match="no model at"):
        runner.update_weights(str(tmp_path / "missing"))
    assert runner.target._graphs is graphs


def test_ignored_layers_are_no_difference(tmp_path):
    path = str(tiny_decoders.write(tmp_path, "qwen3_5"))
    spec = ModelSpec.read(WorkerConfig(path, device="cpu"))
    other = replace(spec, model=replace(spec.model, num_ignored=1))
    with other.opened(path) as checkpoint:
        assert checkpoint.config == other.model


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


def test_an_update_that_fails_half_way_brings_the_old_weights_back(path, other, prompt):
    class FailingOnce(FailingProgress):
        def __call__(self, done, total):
            try:
                super().__call__(done, total)
            except OSError:
                self.fail_after = None
                raise

    progress = FailingOnce()
    runner = load(path, kv_cache_memory=KV_BYTES, on_progress=progress)
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
    runner = load(path, kv_cache_memory=KV_BYTES, on_progress=progress)
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


def test_progress_is_told_whenever_weights_are_loaded(path, other):
    progress = FailingProgress()
    runner = load(path, kv_cache_memory=KV_BYTES, on_progress=progress)
    seen = progress.calls
    runner.update_weights(str(other))
    assert progress.calls == 2 * seen
    fall_asleep(runner, 2)
    runner.wake(ALL_TAGS)
    assert progress.calls == 3 * seen
    fall_asleep(runner, 1)
    runner.wake(ALL_TAGS)
    assert progress.calls == 3 * seen
