"""The states of sequences, which layers without attention carry from token to token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trioengine.core.errors import ModelError
from trioengine.hub.model_config import StatePart
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy


class StateCache:
    """A tensor [num_slots, *shape] for each part of a state, in the order of the layers.

    A slot holds anything at all until a sequence gets it.
    """

    def __init__(self, parts: Sequence[StatePart], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the memory. Raises ModelError if it cannot be had."""
        try:
            self.parts = [
                torch.empty((num_slots, *part.shape), dtype=dtype_of(part, dtype), device=device) for part in parts
            ]
        except RuntimeError as exc:  # torch's for a lack of memory, also on a GPU
            raise ModelError(
                f"memory for {num_slots} state slots cannot be had on {device}: lower max_num_seqs (--max-num-seqs)"
            ) from exc

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy all parts of states at once: a slot that is both source and target is read first."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.parts[0].device).unbind(1)
            for part in self.parts:
                states = part.index_select(0, sources)
                states[sources == PADDING_SLOT] = 0
                part.index_copy_(0, targets, states)


def dtype_of(part: StatePart, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a part of a state in a model of `dtype`."""
    return torch.float32 if part.is_float32 else dtype
