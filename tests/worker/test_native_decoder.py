"""All layers of a decoder in one call: the same bits as layer by layer, with any number of threads."""

import random
from dataclasses import replace

import pytest
import torch
from helpers.torch_driver import load, needs_compiler
from test_batch_invariance import answers, same
from test_scoring import run

from trioengine.core.errors import InvariantError
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels import native_kernels
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.kernels.decoder import LayerByLayer
from trioengine.worker.kernels.native_decoder import NativeDecoder
from trioengine.worker.kernels.torch_kernels import TorchAttention
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


@pytest.fixture
def load_both(monkeypatch):
    """Load a model twice: decoded in one call, and layer by layer."""

    def load_twice(path, dtype, quantization):
        at_once = load(path, dtype, quantization=quantization)
        monkeypatch.setattr(native_kernels, "integer_layers", lambda layers: None)
        return at_once, load(path, dtype, quantization=quantization)

    return load_twice


SHAPES = {
    "plain": {"hidden_size": 96},
    "tied": {"hidden_size": 96},
    "llama3": {"hidden_size": 96},
    "bias": {"hidden_size": 64, "num_hidden_layers": 1},  # queries have 96 columns; it is the last layer at once
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", list(SHAPES))
def test_as_layer_by_layer(tiny_llama, tmp_path, load_both, variant, dtype):
    path = tiny_llama.write(tmp_path / variant, variant, intermediate_size=224, **SHAPES[variant])
    at_once, layer_by_layer = load_both(path, dtype, "int8")
    assert isinstance(at_once.model._decoder, NativeDecoder)
    assert isinstance(layer_by_layer.model._decoder, LayerByLayer)
    rng = random.Random(variant)
    prompts = [[rng.randrange(3, 200) for _ in range(size)] for size in (90, 17, 1, 2, 40, 33, 16, 40, 17)]
    lengths = [9, 10, 8, 9, 5, 7, 6, 4, 2]
    expected, _ = answers(layer_by_layer, prompts, lengths)
    threads = torch.get_num_threads()
    try:
        for count, chunk in ((1, 512), (2, 13), (3, 1)):  # chunks without the end of a prompt have no output rows
            torch.set_num_threads(count)
            found, _ = answers(
                at_once, prompts, lengths, chunked_prefill_size=chunk, max_num_batched_tokens=chunk + 128
            )
            assert same(found, expected)
    finally:
        torch.set_num_threads(threads)


def test_smollm2_as_layer_by_layer(smollm2, load_both):
    at_once, layer_by_layer = load_both(smollm2, "bfloat16", "gguf")
    assert isinstance(at_once.model._decoder, NativeDecoder)
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 49_000) for _ in range(size)] for size in (130, 3, 40)]
    assert same(answers(at_once, prompts, [5, 6, 7])[0], answers(layer_by_layer, prompts, [5, 6, 7])[0])


def test_scored_prompts_as_layer_by_layer(tiny_llama, tmp_path, load_both):
    """Then a step has more output rows than sequences."""
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    params = ResolvedParams(temperature=0.0, max_tokens=4, seed=0, ignore_eos=True, prompt_logprobs=2)
    prompts = [[(7 * i * i + size) % 200 for i in range(size)] for size in (40, 2, 17)]
    at_once, layer_by_layer = (
        run(runner, prompts, params, chunked_prefill_size=16) for runner in load_both(path, "bfloat16", "int8")
    )
    assert at_once[:2] == layer_by_layer[:2]
    assert [len(found) for found in at_once[0]] == [39, 1, 16]


def test_more_output_rows_than_tokens_are_refused(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    runner = load(path, quantization="int8")
    params = ResolvedParams(temperature=0.0, max_tokens=1, seed=0)
    entry = ScheduledSequence(Sequence(0, 0, [3], 1, params, frozenset(), block_table=[0]), 1)
    batch = make_batch(SchedulerOutput((entry,)), runner.info.block_size, runner.model.device)
    many = replace(batch, sample_rows=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvariantError, match="a batch of 1 tokens has 2 output rows"):
        runner.model.forward(many, runner._spec.kernels.attention(many, runner.cache))


def test_weights_that_are_not_all_integers_go_layer_by_layer(tiny_llama, tmp_path):
    """A hidden size of 48 is no whole number of groups, so some products are of the model's dtype."""
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=48, intermediate_size=96)
    assert isinstance(load(path, quantization="int8").model._decoder, LayerByLayer)


def test_the_attention_of_another_backend_is_refused(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    decoder = load(path, quantization="int8").model._decoder
    with pytest.raises(InvariantError, match="the native decoder got another attention"):
        decoder.forward(torch.zeros(1, 96), None, object.__new__(TorchAttention))
