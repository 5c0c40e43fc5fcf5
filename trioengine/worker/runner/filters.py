"""top_k, top_p and min_p as one threshold a row: tokens below it are out.

A threshold is a property of its row alone, whatever the path that finds it; tokens that tie with it stay in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trioengine.core.sampling_params import SamplingParams

_CANDIDATES = 256  # the nucleus is looked for among that many first; all are sorted only where it is larger


def has_filter(params: SamplingParams, vocab_size: int) -> bool:
    """Whether the parameters leave tokens out at all."""
    return _limits_count(params, vocab_size) or params.top_p < 1.0 or params.min_p > 0.0


def filter_rows(scaled: Tensor, params: list[SamplingParams]) -> Tensor:
    """Weights of the tokens that stay, 0 for the others: [num_rows, vocab_size].

    `scaled` is [num_rows, vocab_size] in float32: logits over temperature, less their maximum (so the best is 0).
    """
    vocab_size = scaled.shape[1]
    counts = [row.top_k if _limits_count(row, vocab_size) else 0 for row in params]
    candidates = scaled.topk(min(vocab_size, max(_CANDIDATES, *counts))).values  # [num_rows, candidates], descending
    rows = torch.arange(len(params), device=scaled.device)
    last = torch.tensor([max(count, 1) - 1 for count in counts], device=scaled.device)
    limited = torch.tensor([count > 0 for count in counts], device=scaled.device)
    threshold = torch.where(limited, candidates[rows, last], float("-inf"))
    least = [math.log(row.min_p) if row.min_p > 0.0 else float("-inf") for row in params]
    threshold = torch.maximum(threshold, torch.tensor(least, device=scaled.device))
    weights = torch.where(scaled >= threshold[:, None], scaled.exp(), 0.0)
    for row, row_params in enumerate(params):
        if row_params.top_p < 1.0:
            nucleus = _nucleus(scaled[row], candidates[row], threshold[row], row_params.top_p * weights[row].sum())
            weights[row].masked_fill_(scaled[row] < nucleus, 0.0)
    return weights


def _limits_count(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _nucleus(scaled: Tensor, candidates: Tensor, threshold: Tensor, mass: Tensor) -> Tensor:
    """The smallest value of the fewest best tokens that weigh `mass` together."""
    for values in (candidates, scaled):
        ordered = values if values is candidates else values.sort(descending=True).values
        weights = torch.where(ordered >= threshold, ordered.exp(), 0.0)
        reached = weights.double().cumsum(0) >= mass
        if reached[-1]:
            return ordered[reached.byte().argmax()]
    return threshold  # the sums differ in their last digits: everything stays
