"""All layers of a decoder in one call: the same bits as layer by layer, with any number of threads."""

import random

import pytest
import torch
from helpers.torch_driver import load, needs_compiler
from test_batch_invariance import answers, same

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels import native_kernels
from trioengine.worker.kernels.decoder import LayerByLayer
from trioengine.worker.kernels.native_decoder import NativeDecoder
from trioengine.worker.kernels.torch_kernels import TorchAttention


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["plain", "tied", "llama3", "bias"])
def test_as_layer_by_layer(tiny_llama, tmp_path, load_both, variant, dtype):
    path = tiny_llama.write(tmp_path / variant, variant, hidden_size=96, intermediate_size=192)
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


def test_weights_that_are_not_all_integers_go_layer_by_layer(tiny_llama, tmp_path):
    """A hidden size of 48 is no whole number of groups, so some products are of the model's dtype."""
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=48, intermediate_size=96)
    assert isinstance(load(path, quantization="int8").model._decoder, LayerByLayer)


def test_the_attention_of_another_backend_is_refused(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path / "plain", "plain", hidden_size=96, intermediate_size=192)
    decoder = load(path, quantization="int8").model._decoder
    with pytest.raises(InvariantError, match="the native decoder got another attention"):
        decoder.forward(torch.zeros(1, 96), None, object.__new__(TorchAttention))
