"""Pictures of noise, whose rows are made when they are asked for."""

from __future__ import annotations

import math
import random


class Noise:
    """Noise, as far as a PIL image's methods are needed to send it: no more than some rows are ever in memory."""

    mode = "RGB"

    def __init__(self, num_bytes: int, seed: int) -> None:
        """A square of about so many bytes of RGB."""
        side = max(1, math.isqrt(num_bytes // 3))
        self.size = (side, side)
        self._seed = seed

    def convert(self, mode: str) -> Noise:
        return self

    def crop(self, box: tuple[int, int, int, int]) -> Noise:
        """Some of the rows, which are noise of their own."""
        left, top, right, bottom = box
        rows = Noise(3, hash((self._seed, box)))
        rows.size = (right - left, bottom - top)
        return rows

    def tobytes(self) -> bytes:
        width, height = self.size
        return random.Random(self._seed).randbytes(width * height * 3)
