"""Pictures of noise, whose rows are copied when they are asked for."""

from __future__ import annotations

import math
import random
from functools import cache


class Noise:
    """Noise, as far as a PIL image's methods are needed to send it: no more than some rows are ever in memory.

    All pictures share one block of noise, in which each begins somewhere else, so that a row costs a copy and no
    computation that a user's image would not cost.
    """

    mode = "RGB"

    def __init__(self, num_bytes: int, seed: int) -> None:
        """A square of about so many bytes of RGB."""
        side = max(1, math.isqrt(num_bytes // 3))
        self.size = (side, side)
        self._seed = seed

    def convert(self, mode: str) -> Noise:
        return self

    def crop(self, box: tuple[int, int, int, int]) -> Noise:
        """Some of the rows."""
        left, top, right, bottom = box
        rows = Noise(3, self._seed + top)
        rows.size = (right - left, bottom - top)
        return rows

    def tobytes(self) -> bytes:
        width, height = self.size
        size = width * height * 3
        block = _noise(size)
        begin = self._seed % size
        return block[begin : begin + size]


@cache
def _noise(size: int) -> bytes:
    return random.Random(size).randbytes(size) * 2
