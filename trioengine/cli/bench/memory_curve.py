"""The memory of this process over time: what is resident, what lies in memfds, and the system's shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

INTERVAL = 0.1  # seconds between two samples
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes, `at` seconds after the beginning."""

    at: float
    rss: int  # of this process
    memfds: int  # sizes of the memfds that this process has open
    shmem: int  # of the whole system
    wave: int  # that ran then; 0: none

    @property
    def total(self) -> int:
        return self.rss + self.memfds


class MemoryCurve:
    """Samples of this process, taken by `run`."""

    def __init__(self) -> None:
        self.samples: list[MemorySample] = []
        self.wave = 0
        self._began = trio.current_time()

    async def run(self) -> None:
        """Take a sample every INTERVAL seconds, until cancelled."""
        while True:
            self.take()
            await trio.sleep(INTERVAL)

    def take(self) -> MemorySample:
        sample = MemorySample(trio.current_time() - self._began, _rss(), _memfds(), _shmem(), self.wave)
        self.samples.append(sample)
        return sample

    def maxima(self) -> list[int]:
        """The largest total of each wave, in bytes."""
        waves = sorted({sample.wave for sample in self.samples if sample.wave})
        return [max(sample.total for sample in self.samples if sample.wave == wave) for wave in waves]


def slope(values: Sequence[float]) -> float:
    """By how much each value exceeds the one before, by least squares; 0 for fewer than two."""
    count = len(values)
    if count < 2:
        return 0.0
    middle, mean = (count - 1) / 2, sum(values) / count
    covariance = sum((index - middle) * (value - mean) for index, value in enumerate(values))
    return covariance / sum((index - middle) ** 2 for index in range(count))


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _memfds() -> int:
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(link.readlink()).startswith("/memfd:"):
                total += link.stat().st_size
        except OSError:  # closed meanwhile
            continue
    return total


def _shmem() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))
