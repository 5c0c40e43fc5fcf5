"""What trioengine's own `/metrics` says of a run. Another server has none of it, and then nothing is told.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trioengine.cli.bench.http_client import Address, BackendError, exchange

STOP_TO_ENDED = "trioengine_stop_to_ended_seconds"
KV_USAGE = "trioengine_kv_cache_usage_perc"
RUNNING, WAITING = "trioengine_num_requests_running", "trioengine_num_requests_waiting"
_LINE = re.compile(r"(trioengine_\w+)(?:\{(.*)\})? ([^ ]+)(?: \d+)?")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many were at most each bound, ascending, the last one infinite; and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        return self.counts[-1]

    def since(self, before: Histogram) -> Histogram:
        """What came after another one was taken."""
        pairs = zip(self.counts, before.counts, strict=True)
        return Histogram(self.bounds, tuple(now - then for now, then in pairs), self.sum - before.sum)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def quantile(self, percent: float) -> float:
        """Within its bucket in proportion; the last finite bound where it is beyond that."""
        rank, low, below = self.count * percent / 100, 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)
            low, below = min(bound, self.bounds[-2]) if len(self.bounds) > 1 else 0.0, count
        return low


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading: the values of series without labels, by name, and the histograms."""

    values: Mapping[str, float]
    buckets: Mapping[str, Sequence[tuple[float, float]]]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """Raises ValueError for a value that is no number."""
        values: dict[str, float] = {}
        buckets: dict[str, list[tuple[float, float]]] = {}
        for line in text.splitlines():
            match = _LINE.fullmatch(line.strip())
            if match is None:
                continue
            name, labels, value = match.group(1), match.group(2) or "", float(match.group(3))
            if bound := _BOUND.search(labels):
                buckets.setdefault(name.removesuffix("_bucket"), []).append((float(bound.group(1)), value))
            elif not labels:
                values[name] = value
        return cls(values, buckets)

    def histogram(self, name: str) -> Histogram | None:
        """None where there is none of that name, or one with further labels."""
        pairs = sorted(self.buckets.get(name, ()))
        bounds, counts = tuple(bound for bound, _ in pairs), tuple(count for _, count in pairs)
        if not pairs or len(set(bounds)) < len(bounds) or f"{name}_sum" not in self.values:
            return None
        return Histogram(bounds, counts, self.values[f"{name}_sum"])


class ServerMetrics:
    """Reads a server's `/metrics`."""

    def __init__(self, address: Address, path: str) -> None:
        self._address = address
        self._path = path

    async def read(self) -> Scrape | None:
        """None where there is no such page, or it is another server's."""
        try:
            async with exchange(self._address, "GET", self._path) as response:
                body = await response.read()
            scrape = Scrape.parse(body.decode()) if response.status == 200 else None
        except (BackendError, ValueError):
            return None
        return scrape if scrape is not None and scrape.values else None
