"""Linear layers of torch."""

import pytest
import torch
from helpers.torch_driver import needs_cuda

from trioengine.worker.kernels.linear import make_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_linear_layers_of_torch(dtype, with_bias, rows):
    """Packed where the library can: the product, also of rows that do not lie one after the other."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(96, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    x = torch.randn(rows, 128, generator=generator).to(dtype)[:, :64]
    expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    found = make_linear(weight.clone(), bias if with_bias else None)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=20 * tolerance)
    wide = make_linear(weight.clone(), bias if with_bias else None, torch.float32)(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, found.float())


@pytest.mark.parametrize("with_bias", [False, True])
def test_sums_of_cuda_are_not_rounded(with_bias):
    needs_cuda()
    weight, bias = torch.randn(96, 64).bfloat16().cuda(), torch.randn(96).bfloat16().cuda()
    x = torch.randn(5, 64).bfloat16().cuda()
    found = make_linear(weight, bias if with_bias else None, torch.float32)(x)
    expected = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)
