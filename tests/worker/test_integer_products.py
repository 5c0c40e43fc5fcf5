"""Products of integers: as the same mathematics in torch, and with the same bits in any batch."""

import random

import gguf
import numpy as np
import pytest
import torch
from helpers.torch_driver import load, needs_compiler
from test_batch_invariance import check, check_preemption

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import InvariantError, ModelError
from trioengine.worker.kernels.linear import GROUP
from trioengine.worker.kernels.products import IntegerProducts, can_multiply, join_integers, to_integers
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.runner.model_weights import _choose_linears
from trioengine.worker.weights.files import read_integers

KINDS = ["Q4_0", "Q4_1", "Q8_0"]


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


def stored(kind, rows, columns, seed=0):
    """Random weights as the file stores them, and their values by the gguf package."""
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    exact = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(rows, columns)
    return read_integers(memoryview(data.tobytes()), kind, (rows, columns)), torch.from_numpy(exact)


def reference(x, values, bias):
    """The same quantized mathematics in float64; `values` are the weight's."""
    groups = x.float().view(len(x), -1, GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    factors = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0)  # not by torch's reciprocal
    rounded = (groups.double() * factors.double()).round() * (largest / 127).double()
    return rounded.flatten(1) @ values.double().t() + (0 if bias is None else bias.double())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(kind):
    weight, exact = stored(kind, 48, 96)
    assert torch.allclose(weight.dequantize(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("macros", [{}, {"PORTABLE": 1}], ids=["native", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_reference(kind, dtype, macros):
    products = IntegerProducts(dtype, macros)
    torch.manual_seed(0)
    rng = random.Random(kind)
    for rows in (1, 2, 3, 4, 5, 130):
        outputs, inputs = 16 * rng.randrange(1, 12), 32 * rng.randrange(1, 20)
        weight, exact = stored(kind, outputs, inputs, seed=rows)
        bias = torch.randn(outputs).to(dtype) if rows % 2 else None
        x = (torch.randn(rows, inputs) * 10 ** rng.uniform(-3, 3)).to(dtype)
        expected = reference(x, exact, bias)
        error = (products.make(weight, bias)(x).double() - expected).abs().max()
        assert error <= (1e-5 if dtype == torch.float32 else 4e-3) * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_any_batch_and_with_any_threads(kind):
    weight, _ = stored(kind, 176, 320)
    linear = IntegerProducts(torch.float32).make(weight)
    x = torch.randn(517, 320)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)
    for rows in (1, 2, 3, 4, 6, 127, 129):
        start = 517 - rows
        assert torch.equal(linear(x[start:]), results[0][start:])


def test_what_is_not_finite_stays_in_its_row():
    weight, _ = stored("Q4_1", 32, 64)
    linear = IntegerProducts(torch.float32).make(weight)
    x = torch.randn(5, 64)
    clean = linear(x)
    x[1, 3], x[3, 40] = float("nan"), float("inf")
    result = linear(x)
    assert torch.equal(result[[0, 2, 4]], clean[[0, 2, 4]])
    assert not result[[1, 3]].isfinite().any()


def test_zeros_and_tiny_numbers():
    weight, _ = stored("Q4_1", 32, 64)
    linear = IntegerProducts(torch.float32).make(weight)
    x = torch.zeros(2, 64)
    x[1] = 1e-39
    assert linear(x)[0].count_nonzero() == 0
    assert linear(x).isfinite().all()


def test_eight_bits_of_any_weight():
    values = torch.randn(32, 64)
    values[3] = 0
    weight = to_integers(values)
    assert (weight.dequantize() - values).abs().max() < 0.02
    assert weight.dequantize()[3].count_nonzero() == 0


def test_forms_that_cannot_be_joined_or_multiplied():
    four, _ = stored("Q4_0", 32, 64)
    eight, _ = stored("Q8_0", 32, 64)
    assert join_integers([four, eight]) is None
    assert join_integers([four, None]) is None
    assert join_integers([four, four]).codes.shape == (64, 64)
    assert [can_multiply(torch.Size(shape)) for shape in ((32, 64), (8, 64), (32, 48), (32,))] == [True, *[False] * 3]


def test_an_input_of_another_dtype_is_refused():
    weight, _ = stored("Q4_0", 32, 64)
    with pytest.raises(InvariantError, match=r"got torch\.bfloat16"):
        IntegerProducts(torch.float32).make(weight)(torch.zeros(1, 64).bfloat16())


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


def test_auto_and_none_make_no_integer_products():
    for quantization in ("auto", "none"):
        assert choose_linears(quantization).products is None
    assert choose_linears("none").takes_four_bit is False


def choose_linears(quantization):
    return _choose_linears(WorkerConfig("m.gguf", quantization=quantization), torch.bfloat16, TorchKernels(9))
