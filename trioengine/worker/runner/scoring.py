"""Log-probabilities of a prompt's tokens, computed beside its prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from trioengine.core.messages import SAMPLING_FAILED, RequestFailed
from trioengine.core.types import Logprobs
from trioengine.worker.runner.sampling import NOT_FINITE, logprobs_of
from trioengine.worker.scheduling.sequence import Sampled, ScheduledSequence, SchedulerOutput

MAX_LOGITS = 1 << 22  # that are there at a time: 16 MiB in float32


def with_scores(
    output: SchedulerOutput,
    sampled: list[Sampled],
    hidden: Tensor,  # [num_scores, hidden_size]: the rows of all scores, in their order
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> list[Sampled]:
    """Return the sampled rows with logprobs of the prompts, and rows of their own for those that sampled nothing.

    A sequence whose logits are not finite fails.
    """
    rows = iter(sampled)
    parts = iter(torch.split(hidden, [len(entry.scores) for entry in output.scheduled]))
    found = (_scored(entry, rows, next(parts), logits_of, vocab_size) for entry in output.scheduled)
    return [row for row in found if row is not None]


def _scored(
    entry: ScheduledSequence,
    rows: Iterator[Sampled],
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> Sampled | None:
    row = next(rows) if entry.samples else None
    if isinstance(row, RequestFailed) or not entry.scores:
        return row
    logprobs = _logprobs(entry, hidden, logits_of, max(1, MAX_LOGITS // vocab_size))
    if logprobs is None:
        return entry.sequence.failure(SAMPLING_FAILED, NOT_FINITE)
    return entry.sequence.scored_row(row, logprobs)


def _logprobs(
    entry: ScheduledSequence, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], at_once: int
) -> tuple[Logprobs, ...] | None:
    """One for each of the entry's scores; None if any logits are not finite."""
    sequence, scores = entry.sequence, entry.scores
    top = sequence.params.prompt_logprobs or 0
    found: list[Logprobs] = []
    for start, end in pairwise([*range(0, len(scores), at_once), len(scores)]):
        logits = logits_of(hidden[start:end])
        if not bool(logits.amax(dim=-1).isfinite().all()):
            return None
        targets = sequence.token_ids[scores.start + start : scores.start + end]
        found += logprobs_of(logits, torch.tensor(targets, device=logits.device), top)
    return tuple(found)
