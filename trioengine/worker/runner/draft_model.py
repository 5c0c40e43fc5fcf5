"""A smaller model of the same vocabulary, which drafts the next tokens of the other's sequences.

Its KV cache has the blocks of the other's: the same ids, in the same block tables. It computes each step that the other
computes, so that wherever the other has keys and values of a token, it has its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from trioengine.worker.kernels.batch import ForwardBatch, make_batch
from trioengine.worker.runner.loaded_model import LoadedModel
from trioengine.worker.scheduling.runner_interface import WantedDraft
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from trioengine.worker.scheduling.speculation import shared


class DraftModel:
    """A Drafter whose tokens are the model's likeliest ones."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def follow(self, output: SchedulerOutput, batch: ForwardBatch) -> None:
        """Compute the keys and values of a step, which the batch is made of; adapters are the other model's."""
        self.loaded.copy(output)
        batch = replace(batch, adapters=None)
        if self.loaded.replay(batch) is None:
            self.loaded.forward(batch)

    def draft(self, wanted: Items[WantedDraft], room: int) -> list[tuple[int, ...]]:
        """Draft in as many forward passes as the longest draft has tokens, each over all sequences that go on."""
        shares = shared([each.most for each in wanted], room)
        drafted = [replace(each.sequence, token_ids=[*each.sequence.token_ids]) for each in wanted]
        with torch.inference_mode():
            for size in range(max(shares, default=0)):
                self._append([each for each, share in zip(drafted, shares, strict=True) if share > size])
        sizes = [each.sequence.num_tokens for each in wanted]
        return [tuple(each.token_ids[size:]) for each, size in zip(drafted, sizes, strict=True)]

    def _append(self, sequences: list[Sequence]) -> None:
        """Compute the last token of each, and append the likeliest one behind it."""
        output = SchedulerOutput(tuple(ScheduledSequence(sequence, 1) for sequence in sequences))
        for sequence, token_id in zip(sequences, self._next(output), strict=True):
            sequence.num_computed_tokens += 1
            sequence.token_ids.append(token_id)

    def _next(self, output: SchedulerOutput) -> list[int]:
        loaded = self.loaded
        batch = make_batch(output, loaded.spec.layout.block_size, loaded.padding)
        token_ids: list[int] = loaded.compute(batch).best.token_ids.tolist()
        return token_ids
