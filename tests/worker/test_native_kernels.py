"""The kernels in C++ against formulas in float64, on the layouts that a step may have."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest
import torch
from helpers.attention_step import TOLERANCES, assert_close, randn
from helpers.native_shapes import LESS, SHAPES, make
from helpers.torch_driver import needs_compiler

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import InvariantError, ModelError
from trioengine.worker.kernels import Activation, Residual, RMSNorm, RotaryTable
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.runner.kernel_choice import choose_kernels


@pytest.fixture(autouse=True)
def _compiler():
    needs_compiler()


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(params=[None, *LESS], ids=str)
def at_most(request):
    return request.param


@pytest.mark.parametrize("size", [1, 15, 16, 48, 576])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("norms", ["before", "behind", "both", "none"])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_add(rows, size, norms, scale, dtype, at_most):
    hidden, delta = randn(rows, size), randn(rows, size, dtype=dtype, seed=1)
    norm = RMSNorm(randn(size, seed=2), 1e-5) if norms in ("before", "both") else None
    delta_norm = RMSNorm(randn(size, seed=3), 1e-3) if norms in ("behind", "both") else None
    added = delta.double()
    if delta_norm is not None:
        added = normalized(added, delta_norm).to(dtype).double()
    total = hidden.double() + scale * added
    expected = total if norm is None else normalized(total, norm)
    tolerance = TOLERANCES[dtype]
    for kernels in (make(dtype=dtype, at_most=at_most), TorchKernels(9, dtype)):
        sums = hidden.clone()
        assert_close(kernels.add(sums, delta.clone(), Residual(norm, delta_norm, scale)), expected, dtype)
        torch.testing.assert_close(sums.double(), total, rtol=tolerance, atol=tolerance)


def normalized(x, norm):
    return x * norm.weight / (x.square().mean(dim=-1, keepdim=True) + norm.epsilon).sqrt()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_together", [False, True])
def test_norm_heads(shape, dtype, is_together):
    """Each head by itself, or all together; the others stay."""
    heads, kv_heads, head_dim, *_ = shape
    tokens = randn(9, heads + 2 * kv_heads, head_dim, dtype=dtype)
    for start, stop in ((0, heads), (heads, heads + kv_heads)):
        size = (stop - start) * head_dim if is_together else head_dim
        norm = RMSNorm(randn(size, seed=3), 1e-3)
        expected = tokens.double()
        expected[:, start:stop] = normalized(expected[:, start:stop].reshape(9, -1, size), norm).view(9, -1, head_dim)
        for kernels in (make(shape, dtype), TorchKernels(heads, dtype)):
            found = tokens.clone()
            kernels.norm_heads_(found, start, stop, norm)
            assert_close(found, expected, dtype)
            assert torch.equal(found[:, stop:], tokens[:, stop:])
            assert torch.equal(found[:, :start], tokens[:, :start])


@pytest.mark.parametrize("size", [1, 16, 40, 1536])
@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("activation", Activation)
def test_gated(rows, size, activation, dtype, at_most):
    gate_up = randn(rows, 2 * size, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation is Activation.SILU:
        expected = gate * gate.sigmoid() * up
    else:
        expected = 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up
    assert_close(make(dtype=dtype, at_most=at_most).gated(gate_up, activation), expected, dtype)
    torch.testing.assert_close(
        TorchKernels(9, dtype).gated(gate_up, activation).double(), expected, rtol=3e-2, atol=3e-2
    )


@pytest.mark.parametrize("activation", Activation)
def test_activations_at_the_ends(activation, dtype, at_most):
    gates = [-math.inf, -3e38, -1e35, -100.0, -88.0, 0.0, 88.0, 1e38, math.inf, math.nan, *[1.0] * 6]
    gate_up = torch.tensor([[*gates, *[2.0] * 16]], dtype=dtype)
    found = make(dtype=dtype, at_most=at_most).gated(gate_up, activation)
    numbers = gate_up[:, :16].double()
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    expected = (silu(numbers) if activation is Activation.SILU else gelu(numbers, approximate="tanh")) * 2
    torch.testing.assert_close(found, expected.to(dtype), rtol=TOLERANCES[dtype], atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate(shape, share, dtype):
    """The first heads turn as torch's do, or a half of each; the others stay."""
    heads, kv_heads, head_dim, *_ = shape
    rotary = RotaryTable(torch.rand(head_dim // 2 // share), 100, dtype, torch.device("cpu"), scale=1.5)
    tokens, positions = (
        randn(9, heads + 2 * kv_heads, head_dim, dtype=dtype),
        torch.tensor([0, 99, 5, 5, 1, 2, 3, 4, 50]),
    )
    found, expected = tokens.clone(), tokens.double()
    make(shape, dtype).rotate_(found, heads + kv_heads, rotary, positions)
    exact = RotaryTable.__new__(RotaryTable)
    exact.table, exact.size = rotary.table.double(), rotary.size
    TorchKernels(heads, torch.float32).rotate_(expected, heads + kv_heads, exact, positions)
    assert_close(found, expected, dtype)
    assert torch.equal(found[:, heads + kv_heads :], tokens[:, heads + kv_heads :])
    assert torch.equal(found[:, :, rotary.size :], tokens[:, :, rotary.size :])


def test_to_bfloat16_as_torch_rounds(at_most):
    """To the nearest, ties to even; what is too large becomes infinite. The norm of ones is its weight."""
    ties = torch.arange(1 << 16, dtype=torch.int32) << 16 | 0x8000
    weight = torch.cat((ties - 1, ties, ties + 1)).view(torch.float32)
    hidden, delta = torch.ones(1, len(weight)), torch.zeros(1, len(weight), dtype=torch.bfloat16)
    found = make(dtype=torch.bfloat16, at_most=at_most).add(hidden, delta, Residual(RMSNorm(weight, 0.0)))[0]
    torch.testing.assert_close(found, weight.bfloat16(), rtol=0, atol=0, equal_nan=True)


# ---- which kernels there are -----------------------------------------------------------------------------------------


def test_a_tensor_of_another_layout_is_refused():
    kernels = make(dtype=torch.bfloat16)
    with pytest.raises(InvariantError, match=r"torch\.float32 in strides \(32, 1\), not torch\.bfloat16"):
        kernels.gated(randn(4, 32), Activation.SILU)
    with pytest.raises(InvariantError, match=r"in strides \(1, 4\)"):
        kernels.gated(randn(32, 4, dtype=torch.bfloat16).t(), Activation.SILU)


def test_a_rotation_beyond_the_head_is_refused():
    rotary = RotaryTable(torch.rand(33), 100, torch.float32, torch.device("cpu"))
    with pytest.raises(InvariantError, match="a rotation of 66 elements for heads of 64"):
        make().rotate_(randn(2, 15, 64), 12, rotary, torch.tensor([0, 1]))


class Model:
    num_heads, num_kv_heads, head_dim = 9, 3, 64
    has_states = has_experts = False


@pytest.mark.parametrize(
    ("asked", "device", "found"),
    [
        ("auto", "cpu", "native"),
        ("native", "cpu", "native"),
        ("torch", "cpu", "torch"),
        ("torch", "cuda", "torch"),
    ],
)
def test_choice(asked, device, found):
    config, dtype = WorkerConfig("", kernels=asked), torch.float32
    assert choose_kernels(config, Model(), dtype, torch.device(device), dtype).name == found


def test_triton_on_a_cpu():
    with pytest.raises(ModelError, match="no triton kernels: they are for GPUs, not for the cpu; choose kernels auto"):
        config, dtype = WorkerConfig("", kernels="triton"), torch.float32
        choose_kernels(config, Model(), dtype, torch.device("cpu"), dtype)


@pytest.mark.parametrize(
    ("capability", "has_triton", "message"),
    [
        ((7, 5), True, "Old is older than NVIDIA's Ampere"),
        ((8, 0), False, "triton, which comes with torch for NVIDIA GPUs on Linux, is not installed"),
        ((8, 0), True, "triton does not work: import of triton halted; None in sys.modules"),
    ],
)
def test_a_gpu_without_triton(monkeypatch, capsys, capability, has_triton, message):
    """`auto` is torch, with the reason in the log; `triton` is refused."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
    device, dtype = torch.device("cuda"), torch.float32
    assert choose_kernels(WorkerConfig(""), Model(), dtype, device, dtype).name == "torch"
    assert f"no triton kernels, torch's are slower: {message}" in capsys.readouterr().err
    with pytest.raises(ModelError, match=f"there are no triton kernels: {message}"):
        choose_kernels(WorkerConfig("", kernels="triton"), Model(), dtype, device, dtype)


def test_native_kernels_on_a_gpu():
    with pytest.raises(ModelError, match="no native kernels: they are for the CPU, not for cuda; choose kernels auto"):
        config, dtype = WorkerConfig("", kernels="native"), torch.float32
        choose_kernels(config, Model(), dtype, torch.device("cuda"), dtype)
