"""A counter-based generator: the number drawn for a token depends on the seed and the token's position alone.

The stream of a seed is SplitMix64 (Steele, Lea, Flood 2014) from a hashed start; the position is the counter.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number from [0, 1), in steps of 2**-53."""
    start = _mix((seed & _MASK) ^ _GOLDEN)
    return (_mix((start + position * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
