"""`trioengine bench payload`: the memory of the engine's process while it takes images and streams long answers.

The memory is sampled over waves of requests, each with an image of noise: if it grows from wave to wave, images leak.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.opening import open_engine
from trioengine.cli.bench.report import check_plot, percentile, plot_over_time
from trioengine.cli.progress import progress_bars
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError
from trioengine.core.sampling_params import SamplingParams

QUIET_SECONDS = 1.0  # of memory before the first wave and after the last
INTERVAL = 0.1  # seconds between two samples of the memory
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class PayloadWork:
    """Waves of requests, each with an image of its own; `slow` and `leave` are shares of the readers."""

    requests: int
    waves: int
    image_bytes: int
    output_len: int
    slow: float = 0.0
    leave: float = 0.0
    kill: bool = False  # the worker, in the middle of every second wave
    text_streams: int = 0  # beside the waves, without images
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PayloadSummary:
    """In MB, but for times and counts."""

    idle: float  # resident and memfds, before the first wave
    maxima: tuple[float, ...]  # of each wave
    slope: float  # of the maxima from the second wave on, a wave
    after: float
    shmem_idle: float  # of the whole system
    shmem_max: float
    shmem_after: float
    text_gap_median: float  # ms between two tokens of the text streams
    text_gap_p99: float
    longest_pass: float  # ms of CPU of the event loop between two of its passes
    finished: int
    aborted: int
    failed: int


def bench_payload(config: EngineConfig, work: PayloadWork, *, plot: Path | None, as_json: bool) -> None:
    """Print the figures, and draw the memory over time to the file `plot`."""
    if plot is not None:
        check_plot(plot)
    curve, summary = trio.run(_bench, config, work)
    if plot is not None:
        plot_memory(curve.samples, plot)
    report = {"engine": "trioengine", "model": config.model, **asdict(work), **asdict(summary)}
    if as_json:
        print(json.dumps(report))
        return
    for key, value in report.items():
        print(f"{key:20} {', '.join(map(str, value)) if isinstance(value, tuple) else value}")


# ---- the measurements -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes, `at` seconds after the beginning."""

    at: float
    rss: int  # resident in this process
    memfds: int  # sizes of the memfds that this process has open
    shmem: int  # shared memory of the whole system
    wave: int  # the running wave; 0: none

    @property
    def total(self) -> int:
        return self.rss + self.memfds


class MemoryCurve:
    """Samples of this process's memory, taken by `run`."""

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


class LoopLatency:
    """The longest computation of the event loop between two passes, in CPU seconds: other processes do not count."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        before = time.thread_time()
        while True:
            await trio.sleep(0.002)
            now = time.thread_time()
            self.longest = max(self.longest, now - before)
            before = now


def plot_memory(samples: Sequence[MemorySample], path: Path) -> None:
    """Draw the memory over time, in MB; every second wave is shaded."""
    curves = {
        "resident + memfds": [(sample.at, sample.total / MB) for sample in samples],
        "resident": [(sample.at, sample.rss / MB) for sample in samples],
    }
    waves = {sample.wave for sample in samples if sample.wave % 2}
    times = [[sample.at for sample in samples if sample.wave == wave] for wave in waves]
    plot_over_time(curves, [(during[0], during[-1]) for during in times], path, unit="MB")


def slope(values: Sequence[float]) -> float:
    """The growth from one value to the next, by least squares; 0 for fewer than two."""
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


# ---- the work -------------------------------------------------------------------------------------------------------


async def _bench(config: EngineConfig, work: PayloadWork) -> tuple[MemoryCurve, PayloadSummary]:
    with progress_bars() as bars:
        async with (
            open_engine(config, on_progress=bars.download, on_load=bars.loading) as engine,
            trio.open_nursery() as nursery,
        ):
            curve, latency, gaps = MemoryCurve(), LoopLatency(), list[float]()
            rng = random.Random(work.seed)
            nursery.start_soon(curve.run)
            nursery.start_soon(latency.run)
            for number in range(work.text_streams):
                nursery.start_soon(_stream_text, engine, gaps, number)
            await trio.sleep(QUIET_SECONDS)
            idle = curve.take()
            latency.longest = 0.0
            gaps.clear()
            for wave in range(1, work.waves + 1):
                curve.wave = wave
                await _run_wave(engine, work, wave, rng)
            curve.wave = 0
            text_gaps, longest_pass = sorted(gaps), latency.longest
            await trio.sleep(QUIET_SECONDS)
            after, statistics = curve.take(), engine.statistics()
            await engine.check_invariants()
            nursery.cancel_scope.cancel()
    maxima = tuple(_mb(value) for value in curve.maxima())
    return curve, PayloadSummary(
        idle=_mb(idle.total),
        maxima=maxima,
        slope=round(slope(maxima[1:]), 3),
        after=_mb(after.total),
        shmem_idle=_mb(idle.shmem),
        shmem_max=_mb(max(sample.shmem for sample in curve.samples)),
        shmem_after=_mb(after.shmem),
        text_gap_median=round(percentile(text_gaps, 50), 1) if text_gaps else 0.0,
        text_gap_p99=round(percentile(text_gaps, 99), 1) if text_gaps else 0.0,
        longest_pass=round(1000 * longest_pass, 1),
        finished=statistics.finished,
        aborted=statistics.aborted,
        failed=statistics.failed,
    )


def _mb(nbytes: float) -> float:
    return round(nbytes / MB, 1)


async def _stream_text(engine: Engine, gaps: list[float], number: int) -> None:
    """Send one request after the other, until cancelled; append the ms between two chunks to `gaps`."""
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    async with engine.open_session(wait=True) as session:
        while True:
            async with session.generate(f"Count from {number}.", params, wait=True) as generation:
                await anext(generation)
                before = trio.current_time()
                async for _ in generation:
                    now = trio.current_time()
                    gaps.append(1000 * (now - before))
                    before = now
            session.replace_history([])


async def _run_wave(engine: Engine, work: PayloadWork, wave: int, rng: random.Random) -> None:
    """Send all requests at once; kill the worker, if asked to, when the first of them has half of its answer."""
    half_way = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(work.requests):
            nursery.start_soon(_send_image, engine, work, rng.getrandbits(32), half_way)
        if work.kill and wave % 2 == 0:
            await half_way.wait()
            pid = engine.statistics().worker_pid
            if pid is not None:  # else it has just died
                os.kill(pid, signal.SIGKILL)


async def _send_image(engine: Engine, work: PayloadWork, seed: int, half_way: trio.Event) -> None:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True)
    is_slow, leaves = rng.random() < work.slow, rng.random() < work.leave
    leaves_after = rng.randrange(work.output_len) if leaves else work.output_len
    async with engine.open_session(wait=True) as session:
        image = Noise(work.image_bytes, seed)
        count = 0
        try:
            async with session.generate("What is this?", params, media=[image], wait=True) as generation:
                async for chunk in generation:
                    count += len(chunk.token_ids)
                    if count >= work.output_len // 2:
                        half_way.set()
                    if count > leaves_after:
                        return
                    await trio.sleep(0.5 if is_slow else 0)
        except EngineError:
            return  # the engine's statistics count it


class Noise:
    """An image of noise with the methods of a PIL image that sending needs: only some rows are in memory at a time.

    All images share one block of noise and begin at different places in it, so that a row costs one copy, as it does
    for a user's image.
    """

    mode = "RGB"

    def __init__(self, num_bytes: int, seed: int) -> None:
        """A square of about `num_bytes` bytes of RGB."""
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
