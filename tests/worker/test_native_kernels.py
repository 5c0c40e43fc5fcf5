"""The kernels in C++ against formulas in float64, on the layouts that a step may have."""

from __future__ import annotations

import importlib.util
import math
import sys
from copy import copy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.attention_step import LENGTHS, TOLERANCES, Step, assert_close, randn
from helpers.torch_driver import kv_parts, needs_compiler, spoil

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import InvariantError, ModelError
from trioengine.worker.kernels import Activation, Residual, RMSNorm, RotaryTable
from trioengine.worker.kernels.kv_cache import KVOrder, quantized
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.torch_kernels import TorchKernels
from trioengine.worker.runner.kernel_choice import choose_kernels

LESS = ["AVX2", "0"]  # instructions, where the CPU has more
SHAPES = [  # heads, heads of keys and values, head_dim, block_size, instructions at most
    (9, 3, 64, 16, None),
    (4, 4, 128, 32, None),
    (8, 1, 16, 4, None),
    (6, 2, 40, 7, None),
    (5, 1, 8, 16, None),
    (2, 1, 256, 16, None),
    (7, 1, 24, 16, None),
    (3, 1, 9, 16, None),
    *((9, 3, 64, 16, at_most) for at_most in LESS),
    *((6, 2, 40, 7, at_most) for at_most in LESS),
]


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


@pytest.fixture(
    params=[(torch.float32, None), *((torch.float32, less) for less in LESS), (torch.bfloat16, None)], ids=str
)
def numbers(request):
    """The dtype, and instructions at most: sums of float32, and pairs of bfloat16 where the CPU multiplies them."""
    return request.param


def make(shape=SHAPES[0], dtype=torch.float32, at_most=None, cache_dtype=None):
    heads, kv_heads, head_dim, block_size, less = shape
    return NativeKernels(heads, kv_heads, head_dim, dtype, block_size, at_most or less, cache_dtype)


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, dtype, lengths):
    step = Step(shape, dtype, lengths)
    assert_close(step.run(make(shape, dtype)), step.expected(), dtype)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 63, 100, 1000])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_to_a_window(shape, dtype, lengths, window):
    step = Step(shape, dtype, lengths)
    assert_close(step.run(make(shape, dtype), window), step.expected(window), dtype)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 63, 100, 1000])
@pytest.mark.parametrize("lengths", [*LENGTHS, [(300, 700)], [(600, 600)]], ids=str)
def test_torch_attends_to_a_window(dtype, lengths, window):
    """In one product, in torch's kernel, and in groups of sequences."""
    step = Step(SHAPES[0], dtype, lengths, spoiled=False)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    found = step.run(TorchKernels(9, dtype), window)
    torch.testing.assert_close(found.double(), step.expected(window), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [1, 2, 5, 16, 63, 100])
def test_chunks_do_not_change_the_bits_of_a_window(numbers, window):
    """The last tokens of a chunk alone; what lies before their windows may be nan."""
    dtype, at_most = numbers
    kernels = make(SHAPES[0], dtype, at_most)
    together = Step(SHAPES[0], dtype, [(40, 150)])
    found = together.run(kernels, window)
    for new in (1, 2, 3, 11):
        step = Step(SHAPES[0], dtype, [(40, 150)])
        rest = Step(SHAPES[0], dtype, [(new, 150)])
        step.run(kernels, window)
        rest.reorder(kernels.cache_order)
        rest.cache, rest.batch.block_tables[:] = step.cache, step.batch.block_tables
        rest.tokens = step.tokens[-new:].clone()
        rest.batch.slot_mapping[:] = step.batch.slot_mapping[-new:]
        table = step.batch.block_tables[0]
        for position in range(150 - new - window + 1):
            rest.put(int(table[position // 16]) * 16 + position % 16, torch.full((6, 64), math.nan))
        assert torch.equal(rest.run(kernels, window), found[-new:])


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], (8, 1, 16, 16, None), (7, 1, 24, 16, None)], ids=str)
def test_chunks_of_every_size_have_the_same_bits(numbers, shape, window):
    """A prompt of 600 tokens at once, in chunks, and with one token a step at its end."""
    dtype, at_most = numbers
    kernels = make(shape, dtype, at_most)
    whole = Step(shape, dtype, [(600, 600)])
    found = whole.run(kernels, window)
    for chunks in ([1] * 4, [2] * 3, [3, 3, 5], [16, 16, 1], [5, 111]):
        step = Step(shape, dtype, [(600, 600)])
        step.reorder(kernels.cache_order)
        spoil(step.cache)
        ends, results = [*accumulate([600 - sum(chunks), *chunks])], []
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            part = copy(step)
            part.tokens = step.tokens[start:end].clone()
            part.batch = replace(
                step.batch,
                slot_mapping=step.batch.slot_mapping[start:end],
                query_lens=np.array([end - start]),
                context_lens=np.array([end]),
            )
            results.append(part.run(kernels, window))
        assert torch.equal(torch.cat(results), found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_keys_and_values_are_stored(shape, dtype):
    """Where the slots say, and nothing else is written."""
    step = Step(shape, dtype, [(1, 20), (3, 18)])
    expected, slots = step.stored(), step.batch.slot_mapping
    step.run(make(shape, dtype))
    expected[slots] = step.tokens[:, step.heads :]
    torch.testing.assert_close(step.stored(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim", "at_most", "cache_dtype", "order"),
    [
        (torch.bfloat16, 16, 64, None, None, KVOrder.PAIRS),
        (torch.bfloat16, 32, 2, None, None, KVOrder.PAIRS),
        (torch.bfloat16, 8, 64, None, None, KVOrder.TRANSPOSED_KEYS),
        (torch.bfloat16, 16, 5, None, None, KVOrder.TRANSPOSED_KEYS),
        (torch.bfloat16, 16, 64, "VNNI", None, KVOrder.TRANSPOSED_KEYS),
        (torch.bfloat16, 16, 64, None, torch.int8, KVOrder.TRANSPOSED_KEYS),
        (torch.float32, 16, 64, None, None, KVOrder.TRANSPOSED_KEYS),
    ],
    ids=str,
)
def test_the_order_in_the_cache(dtype, block_size, head_dim, at_most, cache_dtype, order):
    kernels = NativeKernels(1, 1, head_dim, dtype, block_size, at_most, cache_dtype)
    multiplies_pairs = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert kernels.cache_order is (order if multiplies_pairs else KVOrder.TRANSPOSED_KEYS)


def test_a_cache_in_another_order_is_refused():
    step = Step(SHAPES[0], torch.float32, [(1, 1)])
    with pytest.raises(InvariantError, match="got a KV cache in the order ROWS, not TRANSPOSED_KEYS"):
        make().attention(step.batch, step.cache)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 10.0])
def test_scores_of_every_size(scale, at_most):
    """All alike, and so far apart that one key takes all: no overflow, and the largest may come first or last."""
    step = Step(SHAPES[0], torch.float32, [(1, 200), (90, 200)], scale)
    found, expected = step.run(make(at_most=at_most)), step.expected()
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * max(scale, 1e-3))


def test_the_largest_score_comes_last(numbers):
    """Every piece of the keys has larger scores than the one before: the sums are scaled down each time."""
    dtype, at_most = numbers
    step = Step(SHAPES[0], dtype, [(1, 300)])
    step.tokens.fill_(1.0)
    step.contexts[0][:] = (torch.arange(300) / 30 - 5)[:, None, None]
    step.tokens[0, step.heads :] = step.contexts[0][-1]
    table = step.batch.block_tables[0]
    for position in range(299):
        step.put(int(table[position // 16]) * 16 + position % 16, step.contexts[0][position])
    assert_close(step.run(make(SHAPES[0], dtype, at_most)), step.expected(), dtype)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFC00001])
def test_what_is_not_finite_stays_in_its_sequence(bits, numbers):
    """Every nan that there is."""
    dtype, at_most = numbers
    kernels = make(SHAPES[0], dtype, at_most)
    nan = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)[0]
    step = Step(SHAPES[0], dtype, [(1, 40), (1, 30), (20, 60)])
    step.tokens[1, 0, 0] = nan  # a query
    found = step.run(kernels)
    assert found[1, :64].isnan().all()
    assert found[1, 64:].isfinite().all()
    assert found[[0, *range(2, 22)]].isfinite().all()
    step.tokens[1, 0, 0] = 0.0
    step.tokens[0, step.heads, 0] = nan  # a key
    found = step.run(kernels)
    assert found[0, :192].isnan().all()
    assert found[1:].isfinite().all()


IN_CHUNKS = [(SHAPES[0], 7), (SHAPES[1], 4), (SHAPES[1], 3)]  # of few rows keys and values are read in place


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(("shape", "new"), IN_CHUNKS, ids=str)
def test_a_token_that_is_not_finite_stays_behind_those_before_it(numbers, part, shape, new):
    """Its key or its value, in a chunk: the tokens before it have the bits that they have without it."""
    dtype, at_most = numbers
    step = Step(shape, dtype, [(new, 60)])
    without = step.run(make(shape, dtype, at_most))
    for place in range(new):
        step = Step(shape, dtype, [(new, 60)])
        step.tokens[place, step.heads + part * step.kv_heads :] = math.nan
        found = step.run(make(shape, dtype, at_most))
        assert torch.equal(found[:place], without[:place])
        assert found[place:].isnan().all(dim=-1).all()


def test_scores_that_are_minus_infinity(numbers):
    """All of the first ones: what comes later counts."""
    dtype, at_most = numbers
    step = Step(SHAPES[0], dtype, [(1, 150)])
    step.tokens[0, : step.heads].abs_()
    table = step.batch.block_tables[0]
    (keys, places), _ = kv_parts(step.cache, 0)
    for position in range(100):
        keys[int(table[position // 16]), :, places[position % 16]] = -math.inf
        step.contexts[0][position, :3] = -math.inf
    found, expected = step.run(make(SHAPES[0], dtype, at_most)), step.expected()
    assert expected.isfinite().all()
    assert_close(found, expected, dtype)


# ---- a cache of integers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_to_integers(shape, dtype, lengths):
    """Against the formula for the numbers that lie in the cache afterwards."""
    step = Step(shape, dtype, lengths, cache_dtype=torch.int8)
    found = step.run(make(shape, dtype, cache_dtype=torch.int8))
    step.read_contexts()
    assert_close(found, step.expected(), dtype)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_torch_attends_to_integers(dtype, lengths):
    step = Step(SHAPES[0], dtype, lengths, cache_dtype=torch.int8, spoiled=False)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    found = step.run(TorchKernels(9, dtype))
    step.read_contexts()
    torch.testing.assert_close(found.double(), step.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20, 1e-30, 1e-33, 0.0])
def test_integers_are_the_nearest(dtype, at_most, scale):
    """As torch's, but for numbers in the middle between two, which are rounded from other products.

    Other slots keep their integers and scales.
    """
    step = Step(SHAPES[0], dtype, [(1, 20), (3, 18)], scale, cache_dtype=torch.int8)
    integers, scales, slots = step.stored(), step.stored_scales(), step.batch.slot_mapping
    integers[slots], scales[slots] = quantized(step.tokens[:, step.heads :])
    step.run(make(dtype=dtype, at_most=at_most, cache_dtype=torch.int8))
    torch.testing.assert_close(step.stored_scales(), scales, rtol=1e-6, atol=0, equal_nan=True)
    differences = (step.stored().int() - integers.int()).abs()
    assert differences.max() <= 1
    assert differences.count_nonzero() <= 3


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(("shape", "new"), IN_CHUNKS, ids=str)
def test_numbers_that_are_not_finite_make_the_scale_nan(at_most, part, number, shape, new):
    """Of a key or a value: the results of the tokens that see it are nan, and those of no others."""
    for place in range(new):
        step = Step(shape, torch.float32, [(new, 60), (2, 30)], cache_dtype=torch.int8)
        step.tokens[place, step.heads + part * step.kv_heads : step.heads + (part + 1) * step.kv_heads, 5] = number
        found = step.run(make(shape, at_most=at_most, cache_dtype=torch.int8))
        assert found[:place].isfinite().all()
        assert found[place:new].isnan().all()
        assert found[new:].isfinite().all()


def test_one_thread_and_many_agree():
    step = Step(SHAPES[0], torch.bfloat16, LENGTHS[-1])
    kernels, threads = make(SHAPES[0], torch.bfloat16), torch.get_num_threads()
    found = step.run(kernels)
    try:
        torch.set_num_threads(1)
        assert torch.equal(step.run(kernels), found)
    finally:
        torch.set_num_threads(threads)


# ---- the others ------------------------------------------------------------------------------------------------------


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
