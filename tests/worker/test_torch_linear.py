"""Linear layers of torch."""

import pytest
import torch

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
