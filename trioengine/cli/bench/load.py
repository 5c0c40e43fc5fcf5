"""The load: requests that begin when they should, each watched until it is over."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import trio

from trioengine.cli.bench.arrivals import arrivals
from trioengine.cli.bench.backend import Backend
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.departure import Departure, departures
from trioengine.cli.bench.http_client import BackendError
from trioengine.cli.bench.prompts import Prompts
from trioengine.cli.bench.sample import Sample, Stopwatch


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come, `at` seconds after the beginning."""

    prompt: str
    at: float
    departure: Departure | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What a load came to. `seconds` to the end of everything; `max_concurrency`: most requests at a time."""

    seconds: float
    samples: tuple[Sample, ...]  # in the order of their jobs
    max_concurrency: int


def plan(config: BenchConfig, prompts: Prompts) -> list[Job]:
    """The jobs of a configuration; the same for the same seed. Prompts are the same with and without `--leave`."""
    rng = random.Random(config.seed)
    texts = [prompts.draw(rng, config.random_input_len) for _ in range(config.num_prompts)]
    times = arrivals(rng, config.num_prompts, config.request_rate, config.burstiness)
    leaving = departures(rng, config.num_prompts, config.leave, config.random_output_len)
    return [Job(*job) for job in zip(texts, times, leaving, strict=True)]


class _Load:
    def __init__(self, backend: Backend, max_concurrency: int | None) -> None:
        self.samples: dict[int, Sample] = {}
        self.peak = 0
        self._backend = backend
        self._began = trio.current_time()
        self._running = 0
        self._slots: AbstractAsyncContextManager[object] = (
            nullcontext() if max_concurrency is None else trio.CapacityLimiter(max_concurrency)
        )

    async def run(self, jobs: Sequence[Job]) -> None:
        async with trio.open_nursery() as nursery:
            for index, job in enumerate(jobs):
                await trio.sleep_until(self._began + job.at)
                nursery.start_soon(self._request, index, job)

    async def _request(self, index: int, job: Job) -> None:
        async with self._slots:
            self._running += 1
            self.peak = max(self.peak, self._running)
            self.samples[index] = await take_sample(self._backend, job, self._began)
            self._running -= 1


async def take_sample(backend: Backend, job: Job, run_began: float) -> Sample:
    """One request, to its end."""
    watch = Stopwatch(job.departure)
    error = None
    with watch.scope:
        try:
            await backend.ask(job.prompt, watch)
        except BackendError as exc:
            error = str(exc)
    return watch.sample(run_began, error)


async def run_load(backend: Backend, jobs: Sequence[Job], max_concurrency: int | None = None) -> Run:
    """Every job, each at its time, or later where `max_concurrency` are in flight; its times count from then."""
    load = _Load(backend, max_concurrency)
    began = trio.current_time()
    await load.run(jobs)
    samples = tuple(load.samples[index] for index in range(len(jobs)))
    return Run(trio.current_time() - began, samples, load.peak)
