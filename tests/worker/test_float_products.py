"""Products of numbers of the dtype: as in float64, and with the same bits in any batch."""

import pytest
import torch
from helpers.torch_driver import needs_compiler
from test_integer_products import INSTRUCTIONS, check_rows, make_products

from trioengine.core.errors import InvariantError

SHAPES = [(1, 1), (3, 7), (16, 32), (33, 48), (80, 65), (176, 320)]  # outputs, inputs


@pytest.fixture(autouse=True)
def compiler():
    needs_compiler()


def layer(products, outputs, inputs, *, has_bias=False, out_dtype=None):
    """A layer with its weight and bias in float64."""
    weight = torch.randn(outputs, inputs).to(products.dtype)
    bias = torch.randn(outputs).to(products.dtype) if has_bias else None
    exact = weight.double(), torch.zeros(outputs).double() if bias is None else bias.double()
    return products.make(weight, bias, out_dtype), *exact


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_in_float64(shape, dtype, instructions):
    products = make_products(dtype, instructions)
    torch.manual_seed(0)
    for rows in (0, 1, 2, 3, 4, 5, 7, 12, 13, 130):
        linear, weight, bias = layer(products, *shape, has_bias=rows % 2 == 1)
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = x.double() @ weight.t() + bias
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(linear(x).double(), expected, **tolerance)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_bits_in_any_batch_and_with_any_threads(shape, dtype, instructions):
    linear, _, _ = layer(make_products(dtype, instructions), *shape, has_bias=True)
    x = torch.randn(263, shape[1]).to(dtype)
    check_rows(linear, x, (1, 2, 3, 4, 6, 8, 12, 119, 121))


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_in_float32_are_not_rounded(shape, instructions):
    """They are the sums that are rounded to bfloat16 elsewhere, and have the same bits in any batch."""
    products = make_products(torch.bfloat16, instructions)
    torch.manual_seed(0)
    linear, weight, bias = layer(products, *shape, has_bias=True, out_dtype=torch.float32)
    x = torch.randn(263, shape[1]).bfloat16()
    found = linear(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.t() + bias, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.bfloat16(), products.make(weight.bfloat16(), bias.bfloat16())(x))
    check_rows(linear, x, (1, 2, 3, 4, 6, 8, 12, 119, 121))


def test_results_are_of_the_dtype_or_float32():
    for dtype in (torch.float32, torch.bfloat16):
        made = make_products(dtype)
        found = {asked: made.make(torch.zeros(4, 6).to(dtype), out_dtype=asked) for asked in (None, torch.float32)}
        assert [linear(torch.zeros(2, 6).to(dtype)).dtype for linear in found.values()] == [dtype, torch.float32]
    with pytest.raises(InvariantError, match=r"a product in torch\.float32 with results in torch\.bfloat16"):
        make_products(torch.float32).make(torch.zeros(4, 6), out_dtype=torch.bfloat16)


def test_memory_of_results_in_float32_is_used_again():
    """Once nothing refers to them: neither the results nor a view."""
    products = make_products(torch.bfloat16)
    linear = products.make(torch.ones(5, 6).bfloat16(), out_dtype=torch.float32)
    inputs = {number: torch.full((4, 6), number).bfloat16() for number in (1, 2, 3)}
    first = linear(inputs[1])
    row = first[1]
    del first
    second = linear(inputs[2])
    assert (second == 12).all()
    assert (row == 6).all()
    place = second.data_ptr()
    del second
    third = linear(inputs[3][:2])
    assert third.data_ptr() == place
    assert third.tolist() == [[18.0] * 5] * 2
    products.release()
    assert (linear(inputs[1]) == 6).all()
    assert (third == 18).all()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_is_in_the_order_of_the_columns(dtype, instructions):
    """In another order the ones are rounded away."""
    linear = make_products(dtype, instructions).make(torch.ones(20, 4).to(dtype))
    x = torch.tensor([[2.0**30, 1.0, -(2.0**30), 1.0]]).to(dtype).repeat(9, 1)
    assert torch.equal(linear(x), torch.ones(9, 20).to(dtype))


def test_a_weight_that_is_not_finite_stays_in_its_output():
    weight = torch.randn(40, 33)
    clean = make_products(torch.float32).make(weight.clone())
    weight[7, 32], weight[21, 0] = float("nan"), float("inf")
    linear, x = make_products(torch.float32).make(weight), torch.randn(14, 33)
    others = [output for output in range(40) if output not in (7, 21)]
    assert torch.equal(linear(x)[:, others], clean(x)[:, others])
    assert not linear(x)[:, [7, 21]].isfinite().any()


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_what_is_not_finite_stays_in_its_row(instructions):
    linear, _, _ = layer(make_products(torch.float32, instructions), 40, 33)
    x = torch.randn(14, 33)
    clean = linear(x)
    x[1, 3], x[3, 32] = float("nan"), float("inf")
    result = linear(x)
    others = [row for row in range(14) if row not in (1, 3)]
    assert torch.equal(result[others], clean[others])
    assert not result[[1, 3]].isfinite().any()


def test_scratch_is_released():
    products = make_products(torch.float32)
    linear, x = products.make(torch.randn(20, 30)), torch.randn(3, 30)
    before = linear(x)
    assert products.scratch._tensors
    products.scratch.release()
    assert not products.scratch._tensors
    assert torch.equal(linear(x), before)


def test_another_dtype_or_width_is_refused():
    products = make_products(torch.float32)
    for weight in (torch.zeros(4, 4).bfloat16(), torch.zeros(4, 6).t()):
        with pytest.raises(InvariantError, match=r"a native kernel got torch\."):
            products.make(weight)
    weight = torch.zeros(4, 6)
    for bias in (torch.zeros(4).bfloat16(), torch.zeros(8)[::2]):
        with pytest.raises(InvariantError, match=r"a native kernel got torch\."):
            products.make(weight, bias)
    with pytest.raises(InvariantError, match=r"a product of 4 outputs got a bias \[1\]"):
        products.make(weight, torch.zeros(1))
    for shape in ((1, 5), (6,), (1, 2, 6)):
        with pytest.raises(InvariantError, match=r"a product of 6 columns in torch\.float32 got \["):
            products.make(weight)(torch.zeros(shape))
