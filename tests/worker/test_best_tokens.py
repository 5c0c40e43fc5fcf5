"""The best token of every row of logits, in plain torch and in C++, by its definition."""

import math

import pytest
import torch
from helpers.attention_step import randn
from helpers.native_shapes import LESS, make
from helpers.torch_driver import needs_compiler

from trioengine.worker.kernels.best_tokens import best_tokens

SIZES = [1, 5, 16, 256, 300, 1024, 2500]


@pytest.mark.parametrize("size", SIZES)
def test_by_torch(size):
    check(best_tokens, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("at_most", [None, *LESS])
def test_in_cpp(size, at_most):
    needs_compiler()
    check(make(at_most=at_most).best, size)


def check(find, size):
    """Check rows with ties, nan, infinities and zeros, together, alone, and for no row."""
    rows = randn(9, size)
    rows[1, size // 2] = rows[1, -1] = 50.0
    rows[2] -= 100.0
    rows[3] = -math.inf
    rows[4, size // 2] = math.inf
    rows[5] = 0.0
    rows[5, 0] = -0.0
    rows[6, size // 2] = rows[6, -1] = math.nan
    rows[7, -1], rows[7, 0] = math.inf, math.nan
    for some in (rows, rows[6:7].clone(), rows[:0]):
        best, token_ids = find(some)
        expected = [first_best(row.tolist()) for row in some]
        assert token_ids.dtype == torch.int64
        assert token_ids.tolist() == expected
        assert best.dtype == torch.float32
        torch.testing.assert_close(best, some[range(len(some)), expected], rtol=0, atol=0, equal_nan=True)


def first_best(numbers):
    """The place of the first nan if there is one, else of the first maximum."""
    places = [place for place, number in enumerate(numbers) if math.isnan(number)]
    return places[0] if places else numbers.index(max(numbers))
