"""Where a fuzzer's programs come from: uniform choices out of one seed, as a backend of hypothesis.

Hypothesis' own generation spends its effort on small and on repeated values, varies a program five times before it
writes a new one, and depends on what else the process did. Programs of rules want none of it: a seed gives the same
programs in every process, twice as fast. Shrinking stays hypothesis'.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

BACKEND = "trioengine"  # its name, for `settings(backend=...)`
_UNBOUNDED = 1 << 16
_MANY = 8  # characters or bytes, of a text without a limit


class Choices(PrimitiveProvider):
    """Each choice is independent of those before it."""

    random: ClassVar[random.Random] = random.Random(0)

    def draw_boolean(self, p: float = 0.5) -> bool:
        return self.random.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        if min_value is None:
            min_value = (shrink_towards if max_value is None else max_value) - _UNBOUNDED
        return self.random.randint(min_value, min_value + 2 * _UNBOUNDED if max_value is None else max_value)

    def draw_float(self, *, min_value: float = -1e9, max_value: float = 1e9, **_: Any) -> float:
        return self.random.uniform(max(min_value, -1e9), min(max_value, 1e9))

    def draw_string(self, intervals: Any, *, min_size: int = 0, max_size: int = _MANY) -> str:
        size = self.random.randint(min_size, max(min_size, min(max_size, _MANY)))
        return "".join(chr(intervals[self.random.randrange(len(intervals))]) for _ in range(size))

    def draw_bytes(self, min_size: int = 0, max_size: int = _MANY) -> bytes:
        return self.random.randbytes(self.random.randint(min_size, max(min_size, min(max_size, _MANY))))


def sow(seed: int) -> None:
    """From now on the backend chooses by this seed."""
    AVAILABLE_PROVIDERS[BACKEND] = type("SeededChoices", (Choices,), {"random": random.Random(seed)})
