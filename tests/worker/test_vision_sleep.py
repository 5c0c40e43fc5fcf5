"""Sleep, wake and other weights: the vision tower goes with the decoder; and what fails changes nothing."""

import json

import pytest
import torch
from helpers.torch_driver import load

from trioengine.core.errors import InvariantError, ModelError
from trioengine.core.power import ALL_TAGS
from trioengine.worker.kernels import linear
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.models import load_model
from trioengine.worker.weights import open_checkpoint
from trioengine.worker.weights.checkpoint import WeightReader

KV_BYTES = 8 << 20
TILES = torch.arange(3 * 32 * 32, dtype=torch.uint8).view(1, 3, 32, 32)


@pytest.fixture
def directory(tiny_smolvlm, tmp_path):
    return tiny_smolvlm.write(tmp_path / "split", "split")


@pytest.fixture
def runner(directory, device):
    return load(directory, kv_cache_memory=KV_BYTES, device=device)


def features(runner):
    return runner.encode(TILES).tolist()


@pytest.mark.parametrize("level", [1, 2])
def test_the_same_features_after_sleep(runner, directory, level):
    before = features(runner)
    runner.sleep()
    if level == 2:
        runner.update_weights(str(directory))
    with pytest.raises(InvariantError, match="a forward pass while the weights sleep"):
        features(runner)
    runner.wake(ALL_TAGS)
    assert features(runner) == before


def test_other_weights_and_back(tiny_smolvlm, runner, directory, device, tmp_path):
    other = tiny_smolvlm.write(tmp_path / "other", "split", seed=1)
    before, others = features(runner), features(load(other, kv_cache_memory=KV_BYTES, device=device))
    assert others != before
    runner.update_weights(str(other))
    assert features(runner) == others
    runner.update_weights(str(directory))
    assert features(runner) == before


UNFIT = {
    "config.json": ({"model_type": "smolvlm"}, "is another model: model_type is smolvlm, not idefics3$"),
    "preprocessor_config.json": (
        {"image_mean": [0.1, 0.2, 0.3], "size": {"longest_edge": 64}},
        r"is another model: images.longest_edge is 64, not 96, images.mean is \(0.1, 0.2, 0.3\), not \(0.5,",
    ),
}


@pytest.mark.parametrize("file", UNFIT)
def test_weights_that_do_not_fit_change_nothing(tiny_smolvlm, runner, tmp_path, file):
    before = features(runner)
    unfit = tiny_smolvlm.write(tmp_path / "unfit", "split")
    changes, message = UNFIT[file]
    (unfit / file).write_text(json.dumps(json.loads((unfit / file).read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        runner.update_weights(str(unfit))
    assert features(runner) == before


def test_a_model_of_texts_does_not_fit(tiny_llama, runner, tmp_path):
    with pytest.raises(ModelError, match="is another model: model_type is llama, not idefics3"):
        runner.update_weights(str(tiny_llama.write(tmp_path / "llama", "plain")))


def test_all_weights_move_to_host_memory(directory, monkeypatch):
    """Without oneDNN's own layout a layer holds what the reader gave it, as on every device but the CPU."""
    monkeypatch.setattr(linear, "_can_pack", lambda dtype: False)
    runner = load(directory, kv_cache_memory=KV_BYTES)
    checkpoint = open_checkpoint(str(directory))
    wanted = checkpoint.config.wanted_tensors()
    reader = WeightReader(checkpoint, wanted, torch.float32, torch.device("cpu"), lambda done, total: None)
    with torch.inference_mode():
        model = load_model(
            checkpoint.config, reader, TorchKernels(checkpoint.config.text.num_heads, torch.float32), 256
        )
    checkpoint.close()
    runner.target.weights._state = type(runner.target.weights._state)(model, reader.projections, reader.in_use())
    before = features(runner)
    size = sum(tensor.untyped_storage().nbytes() for tensor in reader.in_use())
    assert size == sum(info.nbytes for name, info in checkpoint.tensors.items() if name in wanted)
    runner.sleep()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in reader.in_use())
    runner.wake(ALL_TAGS)
    assert features(runner) == before


def test_the_progress_counts_the_tower(directory):
    progress = []
    load(directory, kv_cache_memory=KV_BYTES, on_progress=lambda done, total: progress.append((done, total)))
    checkpoint = open_checkpoint(str(directory))
    assert progress[-1] == (sum(info.nbytes for info in checkpoint.tensors.values()),) * 2
    checkpoint.close()
