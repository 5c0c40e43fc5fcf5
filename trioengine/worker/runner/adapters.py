"""Loads the matrices of a LoRA adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from safetensors import safe_open
from torch import Tensor

from trioengine.core.errors import ModelError
from trioengine.core.wording import brief
from trioengine.hub.adapter import LowRankChange
from trioengine.hub.safetensors import StoredTensor
from trioengine.worker.kernels.adapters import LoadedAdapter, LowRank
from trioengine.worker.kernels.linear import Linear
from trioengine.worker.weights.checkpoint import Projection


def load_low_rank(
    changes: Mapping[str, LowRankChange],
    projections: Mapping[Linear, Sequence[Projection]],
    make_linear: Callable[[Tensor], Linear],
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedAdapter:
    """Make the changes of a model's linear layers, which have these projections.

    Raises ModelError for matrices that are not finite, and errors of safetensors and torch.
    """

    def load(stored: StoredTensor, scale: float = 1.0) -> Linear:
        tensor = file.get_tensor(stored.name)
        if tensor.shape != stored.shape:
            raise ModelError(f"{stored.name} has changed")
        matrix: Tensor = (tensor.to(torch.float32) * scale).to(dtype).contiguous()
        if not bool(matrix.isfinite().all()):
            raise ModelError(f"{stored.name} has numbers that are not finite")
        return make_linear(matrix.to(device))

    loaded: dict[Linear, list[LowRank]] = {}
    path = next(iter(changes.values())).down.file
    with torch.inference_mode(), safe_open(str(path), framework="pt", device="cpu") as file:
        for linear, parts in projections.items():
            starts = accumulate((part.outputs for part in parts), initial=0)
            for (name, outputs), start in zip(parts, starts, strict=False):
                if (change := changes.get(name)) is not None:
                    down, up = load(change.down), load(change.up, change.scale)
                    loaded.setdefault(linear, []).append(LowRank(start, start + outputs, down, up))
    known = {part.name for parts in projections.values() for part in parts}
    if unknown := changes.keys() - known:
        raise ModelError(f"no linear layer of this model has {brief(min(unknown))}")
    return loaded
