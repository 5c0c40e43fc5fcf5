"""The kernels in Triton against torch's, and attention against the formula in float64.

On a GPU, or, with TRITON_INTERPRET=1, on the CPU by Triton's interpreter, which needs triton and numpy<2.3.
"""

import os

import pytest
import torch
from helpers.attention_step import LENGTHS, Step, assert_close, randn
from helpers.torch_driver import needs_cuda

from trioengine.worker.kernels import Activation, Residual, RMSNorm, RotaryTable
from trioengine.worker.kernels.torch_kernels import TorchKernels

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETS else "cuda")
SHAPES = [(9, 3, 64, 16), (4, 4, 128, 32), (8, 1, 16, 4), (6, 2, 40, 7), (5, 1, 8, 16), (2, 1, 256, 16)]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # of the interpreter
]


@pytest.fixture(autouse=True)
def _triton():
    if not INTERPRETS:
        needs_cuda()
    pytest.importorskip("triton")


@pytest.fixture(params=[torch.float32] if INTERPRETS else [torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    """The interpreter multiplies no bfloat16."""
    return request.param


def triton_kernels(num_heads, dtype):
    from trioengine.worker.kernels.triton_kernels import TritonKernels

    return TritonKernels(num_heads, dtype)


def attend(shape, dtype, lengths, window=None, cache_dtype=None):
    """Of a cache whose other memory is nan."""
    step = Step((*shape, None), dtype, lengths, cache_dtype=cache_dtype)
    moved = step.moved_to(DEVICE)
    found = moved.run(triton_kernels(shape[0], dtype), window)
    if cache_dtype is not None:
        step.cache = moved.cache
        step = step.moved_to(torch.device("cpu"))
        step.read_contexts()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double().cpu(), step.expected(window), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, dtype, lengths):
    attend(shape, dtype, lengths)


@pytest.mark.parametrize("programs", [1, 12])
@pytest.mark.parametrize("lengths", LENGTHS[1::4], ids=str)
def test_contexts_in_few_parts(dtype, lengths, programs, monkeypatch):
    """As where there are many sequences: in one part, and in two."""
    monkeypatch.setattr("trioengine.worker.kernels.triton_attention._PROGRAMS", programs)
    attend(SHAPES[0], dtype, lengths)
    attend(SHAPES[0], dtype, lengths, window=100)


def test_another_step_in_the_memory_of_a_plan(dtype):
    """As in a graph, which is recorded for padding: the tables are wider, and the slots are others."""
    kernels = triton_kernels(9, dtype)
    lengths = [(1, 300), (1, 64), (1, 65)]
    step = Step((*SHAPES[0], None), dtype, lengths)
    padding = Step((*SHAPES[0], None), dtype, [(1, 1)] * 3)
    moved, recorded = step.moved_to(DEVICE), padding.moved_to(DEVICE).batch
    memory = torch.zeros(kernels.plan_size(3, 19), dtype=torch.int32, device=DEVICE)
    attention = kernels.recordable_attention(recorded, moved.cache, memory)
    recorded.slot_mapping.copy_(moved.batch.slot_mapping)
    attention.lay_out(moved.batch)
    found = attention.forward(0, moved.tokens, 64**-0.5)
    torch.testing.assert_close(found.double().cpu(), step.expected(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 100])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention_to_a_window(dtype, lengths, window):
    attend(SHAPES[0], dtype, lengths, window)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_attention_to_integers(shape, dtype, lengths):
    attend(shape, dtype, lengths, cache_dtype=torch.int8)


def test_new_keys_and_values_are_stored(dtype):
    """Where the slots say, and nothing else is written."""
    step = Step((*SHAPES[0], None), dtype, [(1, 20), (3, 18)])
    moved = step.moved_to(DEVICE)
    moved.run(triton_kernels(9, dtype))
    expected = step.stored()
    expected[step.batch.slot_mapping] = step.tokens[:, 9:]
    torch.testing.assert_close(moved.stored().cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_finite_stays_in_its_sequence():
    step = Step((*SHAPES[0], None), torch.float32, [(1, 40), (1, 30), (20, 60)])
    step.tokens[1, 0, 0] = torch.nan  # a query
    found = step.moved_to(DEVICE).run(triton_kernels(9, torch.float32))
    assert found[1, :64].isnan().all()
    assert found[1, 64:].isfinite().all()
    assert found[[0, *range(2, 22)]].isfinite().all()
    step.tokens[1, 0, 0] = 0.0
    step.tokens[0, step.heads, 0] = torch.nan  # a key
    found = step.moved_to(DEVICE).run(triton_kernels(9, torch.float32))
    assert found[0, :192].isnan().all()
    assert found[1:].isfinite().all()


# ---- rows ------------------------------------------------------------------------------------------------------------


def both(dtype):
    return triton_kernels(4, dtype), TorchKernels(4, dtype)


def norm_of(size, seed):
    return RMSNorm((1 + randn(size, seed=seed) / 4).to(DEVICE), 1e-5)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_delta_norm", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (7, 576), (3, 2048), (40, 100)])
def test_add(dtype, rows, size, has_norm, has_delta_norm):
    residual = Residual(norm_of(size, 1) if has_norm else None, norm_of(size, 2) if has_delta_norm else None, 0.5)
    results = []
    for kernels in both(dtype):
        hidden, delta = randn(rows, size).to(DEVICE), randn(rows, size, dtype=dtype, seed=3).to(DEVICE)
        results.append((kernels.add(hidden, delta, residual), hidden))
    (found, hidden), (expected, expected_hidden) = results
    assert_close(found, expected.double().cpu(), dtype)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("together", [True, False])
def test_norm_heads(dtype, together):
    norm = norm_of(4 * 40 if together else 40, 1)
    found, expected = (randn(7, 8, 40, dtype=dtype).to(DEVICE) for _ in range(2))
    for kernels, heads in zip(both(dtype), (found, expected), strict=True):
        kernels.norm_heads_(heads, 1, 5, norm)
    assert_close(found, expected.double().cpu(), dtype)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (40, 24)])
def test_rotate(dtype, head_dim, rotary_dim):
    rotary = RotaryTable(1e4 ** -(torch.arange(rotary_dim // 2) * 2 / rotary_dim), 300, dtype, DEVICE, 1.5)
    positions = torch.tensor([0, 7, 299, 12], device=DEVICE)
    found, expected = (randn(4, 6, head_dim, dtype=dtype).to(DEVICE) for _ in range(2))
    for kernels, heads in zip(both(dtype), (found, expected), strict=True):
        kernels.rotate_(heads, 4, rotary, positions)
    assert torch.equal(found[:, 4:], expected[:, 4:])
    assert torch.equal(found[..., rotary_dim:], expected[..., rotary_dim:])
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [64, 1536, 1000])
def test_gated(dtype, activation, size):
    gate_up = randn(5, 2 * size, dtype=dtype) * 8
    found, expected = (kernels.gated(gate_up.to(DEVICE), activation) for kernels in both(dtype))
    assert_close(found, expected.double().cpu(), dtype)
