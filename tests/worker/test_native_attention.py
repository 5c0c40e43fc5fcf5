"""Attention in C++ against formulas in float64, and with the same bits in any chunks."""

from __future__ import annotations

import itertools
import math
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.attention_step import LENGTHS, TOLERANCES, Step, assert_close
from helpers.native_shapes import LESS, SHAPES, make
from helpers.torch_driver import kv_parts, needs_compiler, spoil

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels.kv_cache import KVOrder, quantized
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.torch_kernels import TorchKernels


@pytest.fixture(autouse=True)
def _compiler():
    needs_compiler()


@pytest.fixture(autouse=True)
def _one_thread():
    """Which computes as many heads together as it can; several threads divide them, where there is little work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
        ends, results = [*itertools.accumulate([600 - sum(chunks), *chunks])], []
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
    step, kernels = Step(SHAPES[0], torch.bfloat16, LENGTHS[-1]), make(SHAPES[0], torch.bfloat16)
    found = step.run(kernels)
    torch.set_num_threads(3)
    assert torch.equal(step.run(kernels), found)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("shape", [SHAPES[0], (16, 8, 16, 32, None), (40, 5, 256, 16, None)], ids=str)
def test_neighbours_and_threads_do_not_change_the_bits_of_a_long_context(numbers, shape, window):
    """Among many sequences a thread reads it whole. Alone, threads share its segments, or these and its heads."""
    dtype, at_most = numbers
    crowd, kernels = Step(shape, dtype, [(1, 2200), (1, 1300), *[(1, 30)] * 20]), make(shape, dtype, at_most)
    found = crowd.run(kernels, window)
    assert_close(found, crowd.expected(window), dtype)
    for index, threads in itertools.product(range(2), (1, 2, 3)):
        torch.set_num_threads(threads)
        alone = copy(crowd)
        alone.tokens = crowd.tokens[index : index + 1].clone()
        alone.batch = replace(
            crowd.batch,
            slot_mapping=crowd.batch.slot_mapping[index : index + 1],
            block_tables=crowd.batch.block_tables[index : index + 1],
            query_lens=np.array([1]),
            context_lens=crowd.batch.context_lens[index : index + 1],
            num_decodes=1,
        )
        assert torch.equal(alone.run(kernels, window), found[index : index + 1])
