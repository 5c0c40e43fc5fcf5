"""RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Norm: TypeAlias = Callable[[Tensor], Tensor]  # [num_tokens, size] in float32 -> the same in the weights' dtype


def make_rms_norm(weight: Tensor, epsilon: float, dtype: torch.dtype) -> Norm:
    """`x * weight / sqrt(mean(x ** 2) + epsilon)` in float32, rounded to `dtype`; weight [size].

    By way of the vector norm: torch's own rms_norm takes nine kernels on the CPU, and twice the time.
    """
    weight = weight.float()
    offset = torch.tensor(epsilon, dtype=torch.float32, device=weight.device)
    share = 1.0 / len(weight)

    def normalize(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [num_tokens, 1]
        scale = torch.addcmul(offset, length, length, value=share).rsqrt_()
        return (x * scale).mul_(weight).to(dtype)

    return normalize
