"""Rotary position embeddings, in Hugging Face's layout: dimension i turns with i + head_dim / 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trioengine.hub.llama_config import RopeScaling, RopeType


def inverse_frequencies(theta: float, head_dim: int, scaling: RopeScaling) -> Tensor:
    """[head_dim / 2] in float32; the formulas are those of transformers' modeling_rope_utils."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    if scaling.kind is RopeType.LINEAR:
        return frequencies / scaling.factor
    if scaling.kind is RopeType.LLAMA3:
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    old = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (old / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > old / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= old / low) & (wavelengths >= old / high)
    return torch.where(between, blended, scaled)


class RotaryTable:
    """Cosines and sines of all positions, each for both halves of a head."""

    def __init__(self, frequencies: Tensor, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        table = torch.cat((cos, cos, -sin, sin), dim=-1)  # the sine carries the rotation's sign
        self.table = table.to(device=device, dtype=dtype)  # [max_positions, 2 * head_dim]
