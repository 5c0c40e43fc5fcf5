"""Linear layers of torch.

On the CPU weights are packed once for its kernels; elsewhere a layer is `F.linear`. A row's result may depend on the
number of rows, by which the library chooses the order of its sums.

Results are of the weight's dtype, or of `out_dtype`, float32. On CUDA those are the sums; on the CPU they have been
rounded to the weight's dtype, since oneDNN's products in torch have no other results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Linear: TypeAlias = Callable[[Tensor], Tensor]  # [num_tokens, in_features] -> [num_tokens, out_features]

_PACKED_FOR = 64  # rows that oneDNN's layout is chosen for; it serves one row as well


def joined(parts: list[Tensor]) -> Tensor:
    """The rows of all parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_linear(weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Linear:
    """The fastest linear layer for the weight [out_features, in_features] where it lies; the weight is consumed."""
    widens = out_dtype is not None and out_dtype != weight.dtype
    if widens and weight.device.type == "cuda":
        return _summing_linear(weight, bias)
    is_packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
    linear = _packed_linear(weight, bias) if is_packed else _plain_linear(weight, bias)
    return _converting_linear(linear) if widens else linear


def _plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return linear


def _summing_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The sums in float32, which the product has anyway; only CUDA has this operation."""

    def linear(x: Tensor) -> Tensor:
        result = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return result if bias is None else result.add_(bias)

    return linear


def _converting_linear(narrow: Linear) -> Linear:
    def linear(x: Tensor) -> Tensor:
        return narrow(x).float()

    return linear


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
    run = torch.ops.mkldnn._linear_pointwise.default
    no_scalars: list[float] = []

    def linear(x: Tensor) -> Tensor:
        result: Tensor = run(x, packed, bias, "none", no_scalars, "")
        return result

    return linear
