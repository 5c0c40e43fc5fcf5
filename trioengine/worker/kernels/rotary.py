"""The frequencies of rotary positions, by the formulas of transformers' modeling_rope_utils."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trioengine.hub.rope_config import RopeScaling, RopeType, yarn_attention_factor


def inverse_frequencies(theta: float, rotary_dim: int, scaling: RopeScaling, max_positions: int) -> Tensor:
    """[rotary_dim / 2] in float32, in radians a position, as transformers has them for `max_positions` tokens."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies = 1.0 / (theta**exponents)
    match scaling.kind:
        case RopeType.DEFAULT:
            return frequencies
        case RopeType.LINEAR:
            return frequencies / scaling.factor
        case RopeType.LLAMA3:
            return _llama3(frequencies, scaling)
        case RopeType.YARN:
            return _yarn(frequencies, theta, scaling)
        case RopeType.LONGROPE:
            is_long = max_positions > scaling.original_max_position_embeddings
            divisors = scaling.long_factor if is_long else scaling.short_factor  # a GGUF file has them as tensors
            return frequencies / torch.tensor(divisors) if divisors else frequencies


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    match scaling.kind:
        case RopeType.YARN:
            return yarn_attention_factor(scaling.factor)
        case RopeType.LONGROPE if scaling.factor > 1:
            return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
        case _:
            return 1.0


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    old = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (old / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > old / low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= old / low) & (wavelengths >= old / high)
    return torch.where(between, blended, scaled)


def _yarn(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Blend the frequencies and the divided ones by a linear ramp over the dimensions (arXiv 2309.00071)."""
    half = len(frequencies)

    def dimension(rotations: float) -> float:
        waves = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return 2 * half * math.log(waves) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    share = ramp.clamp(0, 1)  # of the longer waves
    return frequencies / scaling.factor * share + frequencies * (1 - share)
