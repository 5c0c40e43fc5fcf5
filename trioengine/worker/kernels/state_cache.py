"""The states of sequences, which layers without attention carry from token to token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trioengine.core.errors import ModelError
from trioengine.hub.model_config import Shape
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy


class StateCache:
    """A tensor [num_slots, *shape] for each layer that has a state, in the model's dtype.

    A slot holds anything at all until a sequence gets it.
    """

    def __init__(self, shapes: Sequence[Shape], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the memory. Raises ModelError if it cannot be had."""
        try:
            self.layers = [torch.empty((num_slots, *shape), dtype=dtype, device=device) for shape in shapes]
        except RuntimeError as exc:  # torch's for a lack of memory, also on a GPU
            raise ModelError(
                f"memory for {num_slots} state slots cannot be had on {device}: lower state_slots"
            ) from exc

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states of every layer at once: a slot that is both source and target is read first."""
        if copies:
            sources, targets = torch.tensor(copies, device=self.layers[0].device).unbind(1)
            for layer in self.layers:
                states = layer.index_select(0, sources)
                states[sources == PADDING_SLOT] = 0
                layer.index_copy_(0, targets, states)
