"""`trioengine bench payload`: what images cost the engine's process in memory while their answers are streamed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from trioengine.actors.engine import Engine, open_engine
from trioengine.cli.bench.figures import percentile
from trioengine.cli.bench.memory_curve import MB, MemoryCurve, slope
from trioengine.cli.bench.picture import Noise
from trioengine.cli.bench.plot import check_plot, plot_memory
from trioengine.cli.progress import progress_bars
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineError
from trioengine.core.sampling_params import SamplingParams

QUIET_SECONDS = 1.0  # of memory before the first wave and after the last


@dataclass(frozen=True, slots=True)
class PayloadWork:
    """Waves of requests, each with a picture of its own; `slow` and `leave` are shares of the readers."""

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
class PayloadFigures:
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
    """Print the figures, and draw the curve if `plot` is a file's name."""
    if plot is not None:
        check_plot(plot)
    curve, figures = trio.run(_bench, config, work)
    if plot is not None:
        plot_memory(curve.samples, plot)
    report = {"engine": "trioengine", "model": config.model, **asdict(work), **asdict(figures)}
    if as_json:
        print(json.dumps(report))
    else:
        print("\n".join(f"{key:20} {_shown(value)}" for key, value in report.items()))


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


async def _bench(config: EngineConfig, work: PayloadWork) -> tuple[MemoryCurve, PayloadFigures]:
    with progress_bars() as bars:
        async with (
            open_engine(config, on_progress=bars.download, on_load=bars.loading) as engine,
            trio.open_nursery() as nursery,
        ):
            curve = MemoryCurve()
            rng = random.Random(work.seed)
            nursery.start_soon(curve.run)
            passes, gaps = Passes(), Gaps()
            nursery.start_soon(passes.run)
            for number in range(work.text_streams):
                nursery.start_soon(_stream_text, engine, gaps, number)
            await trio.sleep(QUIET_SECONDS)
            idle = curve.take()
            passes.clear()
            gaps.milliseconds.clear()
            for wave in range(1, work.waves + 1):
                curve.wave = wave
                await _run_wave(engine, work, wave, rng)
            curve.wave = 0
            text_gaps, longest_pass = sorted(gaps.milliseconds), passes.longest
            await trio.sleep(QUIET_SECONDS)
            after, statistics = curve.take(), engine.statistics()
            await engine.check_invariants()
            nursery.cancel_scope.cancel()
    maxima = tuple(round(value / MB, 1) for value in curve.maxima())
    return curve, PayloadFigures(
        idle=round(idle.total / MB, 1),
        maxima=maxima,
        slope=round(slope(maxima[1:]), 3),
        after=round(after.total / MB, 1),
        shmem_idle=round(idle.shmem / MB, 1),
        shmem_max=round(max(sample.shmem for sample in curve.samples) / MB, 1),
        shmem_after=round(after.shmem / MB, 1),
        text_gap_median=round(percentile(text_gaps, 50), 1) if text_gaps else 0.0,
        text_gap_p99=round(percentile(text_gaps, 99), 1) if text_gaps else 0.0,
        longest_pass=round(1000 * longest_pass, 1),
        finished=statistics.finished,
        aborted=statistics.aborted,
        failed=statistics.failed,
    )


class Passes:
    """How long the event loop computes between two of its passes: CPU seconds, so that other processes do not count."""

    def __init__(self) -> None:
        self.longest = 0.0

    def clear(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        before = time.thread_time()
        while True:
            await trio.sleep(0.002)
            now = time.thread_time()
            self.longest = max(self.longest, now - before)
            before = now


class Gaps:
    """Times between two chunks of the text streams, while waves run."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []


async def _stream_text(engine: Engine, gaps: Gaps, number: int) -> None:
    """Ask one question after the other, until cancelled."""
    params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    async with engine.open_session(wait=True) as session:
        while True:
            async with session.generate(f"Count from {number}.", params, wait=True) as generation:
                await anext(generation)
                before = trio.current_time()
                async for _ in generation:
                    now = trio.current_time()
                    gaps.milliseconds.append(1000 * (now - before))
                    before = now
            session.replace_history([])


async def _run_wave(engine: Engine, work: PayloadWork, wave: int, rng: random.Random) -> None:
    """All requests at once; the worker is killed when the first of them has an answer's half."""
    half_way = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(work.requests):
            nursery.start_soon(_ask, engine, work, rng.getrandbits(32), half_way)
        if work.kill and wave % 2 == 0:
            await half_way.wait()
            pid = engine.statistics().worker_pid
            if pid is not None:  # else it has just died
                os.kill(pid, signal.SIGKILL)


async def _ask(engine: Engine, work: PayloadWork, seed: int, half_way: trio.Event) -> None:
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True)
    is_slow, leaves = rng.random() < work.slow, rng.random() < work.leave
    leaves_after = rng.randrange(work.output_len) if leaves else work.output_len
    async with engine.open_session(wait=True) as session:
        picture = Noise(work.image_bytes, seed)
        count = 0
        try:
            async with session.generate("What is this?", params, media=[picture], wait=True) as generation:
                async for chunk in generation:
                    count += len(chunk.token_ids)
                    if count >= work.output_len // 2:
                        half_way.set()
                    if count > leaves_after:
                        return
                    await trio.sleep(0.5 if is_slow else 0)
        except EngineError:
            return  # it is counted
