"""The sampler."""

from __future__ import annotations

from torch import Tensor

from trioengine.worker.scheduling.output import SampledToken
from trioengine.worker.scheduling.sequence import Sequence


def sample(logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    ids = logits.argmax(-1).tolist()
    return [SampledToken(s.request, i) for s, i in zip(sequences, ids, strict=True)]
