"""A histogram as plain numbers: to observe takes half a microsecond, and rendering waits for the scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """How many values were at most each bound, and their sum."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # rising
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)  # the last is of those beyond every bound

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(bound, how many values were at most that), as Prometheus has them; the last bound is infinite."""
        names = [*map(_bound_name, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


def _bound_name(bound: float) -> str:
    return repr(float(bound))
