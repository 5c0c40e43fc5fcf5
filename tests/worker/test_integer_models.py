"""Models whose weights are multiplied as integers: which of them are, and their answers in any batch."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
from helpers.torch_driver import load, needs_compiler
from test_batch_invariance import check, check_preemption
from test_integer_products import NATIVE

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.runner.linear_choice import LinearChoice
from trioengine.worker.runner.model_spec import ModelSpec
from trioengine.worker.weights import open_checkpoint


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


def test_torch_kernels_are_refused(smollm2):
    with pytest.raises(ModelError, match="quantization gguf needs the native kernels, and the torch kernels are in"):
        load(smollm2, quantization="gguf", kernels="torch")


@pytest.mark.usefixtures("one_thread")
def test_smollm2_has_the_same_bits_in_any_batch(smollm2):
    runner = load(smollm2, "bfloat16", kv_cache_memory=128 << 20, quantization="gguf")
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 49_000) for _ in range(size)] for size in (40, 38, 37, 20)]
    check(runner, prompts, [9, 7, 8, 9], chunks=(13,))
    check_preemption(runner, prompts, [29, 28, 27, 20])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_eight_bits_have_the_same_bits_in_any_batch(tiny_llama, tmp_path, dtype):
    """A model with biases that is not stored as integers, of which the head has no whole panels."""
    path = tiny_llama.write(tmp_path / "bias", "bias", hidden_size=96, intermediate_size=2048)
    runner = load(path, dtype, quantization="int8")
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 200) for _ in range(size)] for size in (90, 17, 1, 2, 40, 33, 16, 40, 17)]
    lengths = [29, 30, 18, 19, 25, 17, 26, 24, 20]
    check(runner, prompts, lengths)
    check_preemption(runner, prompts, lengths)


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "auto"), ("gguf", "float32"), ("int8", "auto")])
def test_the_quantization_is_reported(smollm2, quantization, dtype):
    spec = ModelSpec.read(WorkerConfig(str(smollm2), dtype=dtype, quantization=quantization, kv_cache_memory=64 << 20))
    assert spec.quantization == quantization


def test_auto_is_reported_as_its_choice(smollm2, tiny_llama, tmp_path, monkeypatch):
    plain = tiny_llama.write(tmp_path / "plain", "plain")
    for is_fast, path, reported in ((True, smollm2, "gguf"), (False, smollm2, "none"), (True, plain, "none")):
        monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda is_fast=is_fast: is_fast)
        assert ModelSpec.read(WorkerConfig(str(path), kv_cache_memory=64 << 20)).quantization == reported
    config = WorkerConfig(str(plain), quantization="gguf", kv_cache_memory=64 << 20)
    assert ModelSpec.read(config).quantization == "none"


def linears_of(quantization="auto", dtype="bfloat16", kernels=None, *, made=torch.bfloat16, share=1.0):
    """`made` is the dtype of the kernels, which `auto` becomes."""
    kernels = kernels or NativeKernels(*NATIVE, made, 16)
    choice = LinearChoice(WorkerConfig("m.gguf", dtype=dtype, quantization=quantization), kernels)
    return choice.of(SimpleNamespace(integer_share=share))


def takes_integers(*arguments, **options):
    return linears_of(*arguments, **options).takes_integers


def test_auto_takes_integers_where_they_are_fast_and_exact_enough(monkeypatch):
    assert takes_integers() == torch.cpu._is_avx2_supported()
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    assert takes_integers()
    assert takes_integers(dtype="auto", made=torch.float32)
    assert not takes_integers(dtype="float32", made=torch.float32)
    assert not takes_integers(share=0.5)
    assert not takes_integers(kernels=TorchKernels(3, torch.float32))
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert not takes_integers()
    assert takes_integers("gguf")


def test_none_makes_no_integers():
    assert linears_of("none").takes_integers is False


def test_torch_kernels_have_products_of_torch():
    assert linears_of(kernels=TorchKernels(3, torch.float32)).products is None
    kernels = NativeKernels(*NATIVE, torch.float32, 16)
    assert linears_of("none", kernels=kernels).products is kernels.products


def test_each_checkpoint_that_is_loaded_is_looked_at(monkeypatch):
    """Also after an update of the weights, as a new worker would."""
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    choice = LinearChoice(WorkerConfig("m.gguf"), NativeKernels(*NATIVE, torch.bfloat16, 16))
    found = [choice.of(SimpleNamespace(integer_share=share)).takes_integers for share in (0.0, 0.6, 0.4, 1.0)]
    assert found == [False, True, False, True]


def test_which_checkpoints_have_integers(smollm2, tiny_llama, tmp_path):
    for path, share in ((smollm2, 1.0), (tiny_llama.write(tmp_path / "plain", "plain"), 0.0)):
        with contextlib.closing(open_checkpoint(str(path))) as checkpoint:
            assert checkpoint.integer_share == share
