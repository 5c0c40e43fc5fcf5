"""Embeddings: the hidden state of a prompt's last token, behind the last norm, with the length 1."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from trioengine.core.messages import SAMPLING_FAILED
from trioengine.worker.scheduling.sequence import Sampled, ScheduledSequence

NOT_FINITE = "the embedding is not finite"


def embed_all(hidden: Tensor, scheduled: Iterable[ScheduledSequence]) -> list[Sampled]:
    """The result of each entry with its prompt's last token, from a row of hidden states [num_rows, hidden_size] each.

    A row that is not finite, or has no direction, fails alone.
    """
    entries = [entry for entry in scheduled if entry.samples]
    return [_embedded(entry, row) for entry, row in zip(entries, hidden.cpu(), strict=True)]


def _embedded(entry: ScheduledSequence, hidden: Tensor) -> Sampled:
    """Normalize one row at a time, so that its bits do not depend on the others."""
    vector = hidden.double()
    normalized = (vector / vector.norm()).float()
    if not bool(normalized.isfinite().all()):
        return entry.sequence.failure(SAMPLING_FAILED, NOT_FINITE)
    return entry.sequence.embedded_row(normalized.numpy().astype("<f4").tobytes())
