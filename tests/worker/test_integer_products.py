"""Products of integers: as the same mathematics in torch, and with the same bits in any batch."""

import random

import gguf
import numpy as np
import pytest
import torch
from helpers.torch_driver import needs_compiler

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels.integer_weights import GROUP, IntegerWeight, can_multiply, join_integers, to_integers
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.weights.blocks import dequantize_exact, read_integers

KINDS = ["Q4_0", "Q4_1", "Q8_0", "Q5_1"]  # one of each form
EXACT = [*KINDS, "Q5_0", "Q4_K", "Q5_K"]
NATIVE = (3, 1, 64)  # the shape of a model
INSTRUCTIONS = ["BF16", "VNNI", "AVX512", "AVX2", "0"]  # where the CPU has them, else fewer; 0: those of GCC's choice


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


def quantized(kind, rows, columns, rng):
    """The bytes of random weights."""
    return gguf.quants.quantize(rng.normal(size=(rows, columns)).astype(np.float32), gguf.GGMLQuantizationType[kind])


def blocks_of(kind, rows, columns, rng):
    """Random bytes, for types that the gguf package does not write, with random numbers for the blocks' scales."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, size=(rows, columns // elements, size), dtype=np.uint8)
    first, last = (size - 2, size) if kind == "Q6_K" else (0, 4)
    numbers = rng.uniform(1e-3, 2e-3, size=(rows, columns // elements, (last - first) // 2)).astype(np.float16)
    blocks[..., first:last] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


def bytes_of(kind, rows, columns, seed):
    make = blocks_of if kind.endswith("_K") else quantized
    return make(kind, rows, columns, np.random.default_rng(seed))


def stored(kind, rows, columns, seed=0):
    """Random weights as the file stores them, and their values by the gguf package."""
    data = bytes_of(kind, rows, columns, seed)
    exact = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(rows, columns)
    return read_integers(memoryview(data.tobytes()), kind, (rows, columns)), torch.from_numpy(exact)


def make_products(dtype, at_most=None):
    """Use a library that is compiled for some model: products do not depend on its shape."""
    return NativeKernels(*NATIVE, dtype, 16, at_most).products


def check_rows(linear, x, counts):
    """The last rows have the same bits alone, in these numbers, as among all, with any number of threads."""
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)
    for rows in counts:
        assert torch.equal(linear(x[len(x) - rows :]), results[0][len(x) - rows :])


def float32(values):
    """Each operation of `quantized_rows` is rounded to float32, as the kernels' operations are."""
    return values.float().double()


def quantized_rows(x):
    """The units [rows, 1], the codes [rows, groups, GROUP], and the scales, offsets and sums [rows, groups]."""
    groups = x.double().view(len(x), -1, GROUP)
    largest = groups.abs().amax(dim=(1, 2)).clamp(min=1e-30)[:, None]
    units = float32(float32(largest * (1 + 2**-14)) / (127 * 32767))
    high, low = groups.amax(dim=-1), groups.amin(dim=-1)
    offset_unit = 128 * units
    offsets = (float32((high + low) / 2) * float32(1 / offset_unit)).round()
    middle = offsets * offset_unit
    ranges = float32(torch.maximum(high - middle, middle - low))
    scales = float32(ranges * float32(float32(1 / units) / 127) + 0.5).round()
    factors = torch.where(scales > 0, float32(1 / float32(scales * units)), 0.0)
    codes = (float32(groups - float32(middle)[..., None]) * factors[..., None]).round()
    assert codes.abs().max() <= 127 and scales.max() <= 32767
    sums = (float32(scales * codes.sum(dim=-1)) / 4096).round() + offsets
    return units, codes, scales, offsets, sums


def quantized_weight(weight):
    """The units [outputs, 1], and the scales, totals and minima [outputs, groups]."""
    middle = 1 << (weight.bits - 1)
    codes = weight.codes.double().view(len(weight.codes), -1, GROUP) - middle
    scales = weight.scales.double()
    minima = -weight.zero * scales if weight.minima is None else weight.minima.double()
    minima = float32(minima + middle * scales)
    largest = float32((middle * scales.abs() + minima.abs()).amax(dim=1, keepdim=True))
    units = float32(largest / (8 * 32767)).clamp(min=1e-30)
    scales = float32(scales / units)
    factors = [scales * (middle / 8), float32(scales * codes.sum(dim=-1) / 256), float32(minima / units) / 8]
    assert all(values.abs().max() <= 32767.4 for values in factors)
    return units, *(values.round() for values in factors)


def reference(x, weight, bias):
    """The same quantized mathematics; the sums of groups are exact."""
    weight = weight.with_bits(4 if weight.bits == 4 else 8)
    row_units, row_codes, row_scales, offsets, sums = quantized_rows(x)
    units, scales, totals, minima = quantized_weight(weight)
    codes = weight.codes.double().view(len(weight.codes), -1, GROUP) - (1 << (weight.bits - 1))
    dots = torch.einsum("ogk,rgk->rog", codes, row_codes)
    dots = (dots / (1 << 4 if weight.bits > 4 else 1) + (0.5 if weight.bits > 4 else 0)).floor()
    both = ((scales * row_scales[:, None] + (1 << 14)) / (1 << 15)).floor()
    products = (dots * both).sum(dim=-1) + offsets @ totals.t() + sums @ minima.t()
    result = products * (units.t() * row_units * (1 << 15))
    return result + (0 if bias is None else bias.double())


def extreme_weights():
    """All codes the largest, the least, or in turn; scales of both signs, also with far larger minima."""
    codes = torch.tensor([15, 0]).repeat(64)
    rows = torch.stack([codes * 0 + 15, codes * 0, codes, codes.flip(0)]).repeat(4, 1).to(torch.uint8)
    scales = torch.where(torch.arange(16) < 8, 1.0, -1.0)[:, None].repeat(1, 4)
    for bits, codes, zero in ((4, rows, 8), (8, rows * 17, 128), (5, rows * 2, 16)):
        yield IntegerWeight(codes, scales, None, zero, bits)
        yield IntegerWeight(codes, scales, -zero * scales, 0, bits)
        yield IntegerWeight(codes, scales, 300 * scales, 0, bits)


def extreme_rows():
    rows = torch.full((6, 128), -1.0)
    rows[1] = 1.0
    rows[2:, ::2] = 1.0
    rows[3] *= -1
    rows[4, 64:] *= 1e-4
    rows[5, 1:] = 1.0  # so all others have the largest code
    return rows


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_largest_numbers(instructions):
    """Sums in 16 and 32 bits have room for them."""
    x = extreme_rows()
    for weight in extreme_weights():
        found = make_products(torch.float32, instructions).make_integer(weight)(x).double()
        expected = reference(x, weight, None)
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
        exact = x.double() @ weight.dequantize().double().t()
        assert (found - exact).abs().max() <= 1e-4 * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_all_instructions_have_the_same_bits(kind):
    weight, _ = stored(kind, 48, 352)
    x = torch.randn(9, 352)
    results = [make_products(torch.float32, each).make_integer(weight)(x) for each in INSTRUCTIONS]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outlier", [1, 30, 1000])
def test_integer_factors_cost_little(kind, outlier):
    """Hardly farther from the exact product than codes with exact factors, also in rows with one large number."""
    weight, exact = stored(kind, 64, 576)
    x = torch.randn(100, 576)
    x[:, 40] *= outlier
    groups = x.double().view(100, -1, GROUP)
    low = groups.amin(dim=-1, keepdim=True)
    steps = (groups.amax(dim=-1, keepdim=True) - low) / 255
    rounded = (((groups - low) / steps).round() * steps + low).flatten(1)
    expected = x.double() @ exact.double().t()
    error = (rounded @ exact.double().t() - expected).pow(2).mean()
    found = make_products(torch.float32).make_integer(weight)(x).double()
    assert (found - expected).pow(2).mean() <= 1.1 * error


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (1001, 1024)])
def test_nothing_is_lost(kind, rows, columns):
    """The numbers of the gguf package, to the bit; a large matrix is dequantized in pieces."""
    data = bytes_of(kind, rows, columns, 0)
    exact = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])).view(rows, columns)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize_exact(memoryview(data.tobytes()), kind, (rows, columns), dtype)
        assert torch.equal(found, exact.to(dtype))


def test_six_bits_are_quantized_again():
    weight, exact = stored("Q6_K", 3000, 512)
    groups = exact.view(3000, -1, GROUP)
    steps = groups.abs().amax(dim=-1) / 127
    assert ((weight.dequantize().view_as(groups) - groups).abs().amax(dim=-1) <= 0.51 * steps + 1e-6).all()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_reference(kind, dtype, instructions):
    made = make_products(dtype, instructions)
    torch.manual_seed(0)
    rng = random.Random(kind)
    for rows in (1, 2, 3, 4, 5, 130):
        outputs, inputs = 16 * rng.randrange(1, 12), 32 * rng.randrange(1, 20)
        weight, _ = stored(kind, outputs, inputs, seed=rows)
        bias = torch.randn(outputs).to(dtype) if rows % 2 else None
        x = (torch.randn(rows, inputs) * 10 ** rng.uniform(-3, 3)).to(dtype)
        expected = reference(x, weight, bias)
        error = (made.make_integer(weight, bias)(x).double() - expected).abs().max()
        assert error <= (1e-5 if dtype == torch.float32 else 4e-3) * expected.abs().max()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_any_batch_and_with_any_threads(kind, instructions):
    weight, _ = stored(kind, 176, 320)
    linear = make_products(torch.float32, instructions).make_integer(weight)
    x = torch.randn(517, 320)
    check_rows(linear, x, (1, 2, 3, 4, 6, 127, 129))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_results_in_float32_are_not_rounded(kind, instructions):
    """They are the sums that are rounded to bfloat16 elsewhere, and have the same bits in any batch."""
    made = make_products(torch.bfloat16, instructions)
    weight, _ = stored(kind, 176, 320)
    bias, x = torch.randn(176).bfloat16(), torch.randn(131, 320).bfloat16()
    linear = made.make_integer(weight, bias, torch.float32)
    found, expected = linear(x), reference(x, weight, bias)
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(found.bfloat16(), made.make_integer(weight, bias)(x))
    check_rows(linear, x, (1, 2, 3, 4, 6, 127, 129))


def test_what_is_not_finite_stays_in_its_row():
    weight, _ = stored("Q4_1", 32, 64)
    linear = make_products(torch.float32).make_integer(weight)
    x = torch.randn(5, 64)
    clean = linear(x)
    x[1, 3], x[3, 40] = float("nan"), float("inf")
    result = linear(x)
    assert torch.equal(result[[0, 2, 4]], clean[[0, 2, 4]])
    assert not result[[1, 3]].isfinite().any()


def test_zeros_and_tiny_numbers():
    weight, _ = stored("Q4_1", 32, 64)
    linear = make_products(torch.float32).make_integer(weight)
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


def test_forms_that_can_be_joined_or_multiplied():
    parts = [stored(kind, 32, 256)[0] for kind in (*EXACT, "Q6_K")]
    whole = join_integers(parts)
    values = torch.cat([part.dequantize() for part in parts])
    assert torch.allclose(whole.dequantize(), values, rtol=0, atol=1e-6 * values.abs().max())
    assert (whole.bits, whole.zero, whole.is_finite) == (8, 0, True)
    assert join_integers([parts[0], None]) is None
    assert join_integers([parts[0], parts[0]]).minima is None
    assert join_integers([parts[0], parts[1]]).bits == 4
    assert [can_multiply(torch.Size(shape)) for shape in ((32, 64), (8, 64), (32, 48), (32,))] == [True, *[False] * 3]


def test_an_input_of_another_dtype_is_refused():
    weight, _ = stored("Q4_0", 32, 64)
    with pytest.raises(
        InvariantError, match=r"a product of 64 columns in torch\.float32 got \[1, 64\] in torch\.bfloat16"
    ):
        make_products(torch.float32).make_integer(weight)(torch.zeros(1, 64).bfloat16())
    with pytest.raises(InvariantError, match=r"a product of 64 columns in torch\.float32 got \[2, 32\]"):
        make_products(torch.float32).make_integer(weight)(torch.zeros(2, 32))


@pytest.mark.parametrize("size", [2e33, 3e-38])
def test_huge_and_tiny_weights(size):
    """Their factors have 16 bits."""
    weight = to_integers(size * torch.randn(16, 96))
    x = torch.randn(3, 96)
    expected = x.double() @ weight.dequantize().double().t()
    found = make_products(torch.float32).make_integer(weight)(x).double()
    assert (found - expected).abs().max() <= max(1e-2 * expected.abs().max(), 1e-31)


def test_the_largest_activations():
    weight = to_integers(1e-3 * torch.randn(16, 96))
    x = torch.randn(2, 96) * 1e37
    x[1, 0] = torch.finfo(torch.float32).max
    found = make_products(torch.float32).make_integer(weight)(x)
    expected = x[0].double() @ weight.dequantize().double().t()
    assert (found[0].double() - expected).abs().max() <= 1e-2 * expected.abs().max()
    assert not found[1].isfinite().any()  # its unit has no room for the rounding of offsets


def test_a_zero_without_minima():
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    weight, x = IntegerWeight(codes, torch.ones(16, 2), None, 0, 4), torch.randn(3, 64)
    expected = x.double() @ codes.double().t()
    found = make_products(torch.float32).make_integer(weight)(x)
    assert (found.double() - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("outlier", [30, 300])
def test_small_groups_beside_an_outlier_that_has_no_weight(outlier):
    values = torch.randn(64, 576)
    values[:, :GROUP] = 0
    weight = to_integers(values)
    x = torch.randn(100, 576)
    x[:, 7] = outlier
    expected = x.double() @ weight.dequantize().double().t()
    found = make_products(torch.float32).make_integer(weight)(x).double()
    assert (found - expected).pow(2).mean().sqrt() <= 0.02 * expected.pow(2).mean().sqrt()


def test_weights_that_are_not_finite_are_found():
    assert to_integers(torch.full((32, 64), 1e37)).is_finite
    assert not to_integers(torch.full((32, 64), float("nan"))).is_finite
    weight, _ = stored("Q4_1", 32, 64)
    assert weight.is_finite
    weight.minima[3, 1] = float("inf")
    assert not weight.is_finite


def test_scratch_is_released():
    weight, _ = stored("Q4_0", 32, 64)
    made = make_products(torch.float32)
    linear, x = made.make_integer(weight), torch.randn(3, 64)
    before = linear(x)
    assert made.scratch._tensors
    made.scratch.release()
    assert not made.scratch._tensors
    assert torch.equal(linear(x), before)
