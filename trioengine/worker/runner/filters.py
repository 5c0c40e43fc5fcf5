"""top_k, top_p and min_p: a threshold for each row, below which tokens are out.

A threshold is a property of its row alone, whatever the path that finds it. Of the tokens that tie with it, top_k and
top_p keep those with the lowest ids, so that exactly top_k tokens stay, or the fewest that reach top_p; min_p keeps
all of them.
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
    staying = (scaled >= threshold[:, None]).sum(dim=-1).tolist()
    for row, row_params in enumerate(params):
        if 0 < counts[row] < staying[row]:
            _keep(weights[row], scaled[row], threshold[row], counts[row])
        if row_params.top_p < 1.0:
            mass = row_params.top_p * weights[row].sum()
            if (last_one := _nucleus(scaled[row], candidates[row], threshold[row], mass)) is not None:
                _keep(weights[row], scaled[row], *last_one)
    return weights


def _limits_count(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _keep(weights: Tensor, scaled: Tensor, smallest: Tensor, count: int) -> None:
    """Take out all but the `count` best tokens of a row, of which `smallest` is the last one's value."""
    weights.masked_fill_(scaled < smallest, 0.0)
    tied = (scaled == smallest).nonzero().squeeze(1)  # in the order of their ids
    weights[tied[count - int((scaled > smallest).sum()) :]] = 0.0


def _nucleus(scaled: Tensor, candidates: Tensor, threshold: Tensor, mass: Tensor) -> tuple[Tensor, int] | None:
    """The smallest value of the fewest best tokens that weigh `mass` together, and their number; None: all stay."""
    for values in (candidates, scaled):
        ordered = values if values is candidates else values.sort(descending=True).values
        weights = torch.where(ordered >= threshold, ordered.exp(), 0.0)
        reached = weights.double().cumsum(0) >= mass
        if reached[-1]:
            index = int(reached.byte().argmax())
            return ordered[index], index + 1
    return None  # the sums differ in their last digits
