"""The best tokens of rows of logits, by their definition."""

import math

import torch

from helpers.attention_step import randn


def check_best_tokens(find, size):
    """Check `Kernels.best` for rows with ties, nan, infinities and zeros, together, alone, and for no row."""
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
        expected = [_first_best(row.tolist()) for row in some]
        assert token_ids.dtype == torch.int64
        assert token_ids.tolist() == expected
        assert best.dtype == torch.float32
        torch.testing.assert_close(best, some[range(len(some)), expected], rtol=0, atol=0, equal_nan=True)


def _first_best(numbers):
    """The place of the first nan if there is one, else of the first maximum."""
    places = [place for place, number in enumerate(numbers) if math.isnan(number)]
    return places[0] if places else numbers.index(max(numbers))
