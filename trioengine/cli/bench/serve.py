"""`trioengine bench serve`: a load on a server, measured from the clients' side."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from trioengine.cli.bench.backends import (
    CPU_SECONDS,
    KV_USAGE,
    RUNNING,
    STOP_TO_ENDED,
    WAITING,
    Completions,
    Realtime,
    Scrape,
    ServerMetrics,
    idle_sessions,
)
from trioengine.cli.bench.config import REALTIME, BackendKind, BenchConfig
from trioengine.cli.bench.load import Backend, Departure, End, Job, Moment, Prompts, Run, plan, run_load, take_sample
from trioengine.cli.bench.report import (
    ServerMeasurements,
    as_json_object,
    check_plot,
    errors_of,
    plot_latencies,
    print_table,
    requests_of,
    summarize,
)
from trioengine.cli.errors import warn
from trioengine.cli.http_client import RequestError, describe_error, endpoint_at, fetch
from trioengine.client.address import Endpoint
from trioengine.core.errors import EngineError, InvalidConfig

PROBES = 5
POLL = 0.002  # seconds from one reading of the gauges to the next
PATIENCE = 10.0  # seconds; the longest wait for an idle server


@dataclass(frozen=True, slots=True)
class Output:
    """Where the result goes. `json` replaces the table on stdout; the files are written besides."""

    json: bool = False
    save_result: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A run, with the server's own measurements of it."""

    model: str | None
    run: Run
    server: ServerMeasurements


def bench_serve(config: BenchConfig, output: Output) -> int:
    """Run the load and report it; return 1 if a request failed, else 0.

    Raises InvalidConfig for a file that cannot be written, EngineError if the server does not answer at all.
    """
    check_files(output)
    prompts = Prompts.find()
    result = trio.run(measure, config, endpoint_at(config.base_url, config.api_key), prompts)
    summary = summarize(result.run, config.metrics, config.percentiles, config.goals)
    report = as_json_object(config, result.model, prompts.unit, summary, result.server)
    if output.save_result is not None:
        output.save_result.write_text(json.dumps(report | {"requests": requests_of(result.run)}) + "\n")
    if output.plot is not None:
        plot_latencies(result.run, config.metrics, output.plot)
    if output.json:
        print(json.dumps(report))
    else:
        print_table(prompts.unit, summary, result.server)
    for error, times in errors_of(result.run).items():
        warn(f"error: {times} requests failed: {error}")
    return int(summary.failed > 0)


def check_files(output: Output) -> None:
    """Raises InvalidConfig for a file that cannot be written; before a run, not after it."""
    for name, path in (("save_result", output.save_result), ("plot", output.plot)):
        if path is not None and not path.parent.is_dir():
            raise InvalidConfig.of(name, f"must be a file in a directory that exists, got {str(path)!r}")
    if output.plot is not None:
        check_plot(output.plot)


async def measure(config: BenchConfig, server: Endpoint, prompts: Prompts) -> Result:
    """Send one request, and if it is answered, run the load. Raises EngineError if it is not."""
    backend, model = await _open_backend(config, server)
    metrics = ServerMetrics(server, config.base_path + "/metrics")
    rng = random.Random(-1 - config.seed)
    extra = [prompts.draw(rng, config.random_input_len) for _ in range(1 + PROBES)]
    first = await take_sample(backend, Job(extra[0], 0.0), trio.current_time())
    if first.end is End.FAILED:
        raise EngineError(f"{config.base_url} cannot be measured: {first.error}")
    before = await metrics.read()
    try:
        async with idle_sessions(server, config.base_path + REALTIME, config.idle_sessions):
            run = await run_load(backend, plan(config, prompts), config.max_concurrency)
    except RequestError as exc:
        raise EngineError(f"an idle session of {config.base_url}: {exc}") from exc
    cpu_seconds = _rise(CPU_SECONDS, before, await metrics.read())
    if before is None or KV_USAGE not in before.values or not config.leave:
        return Result(model, run, ServerMeasurements(cpu_seconds))
    blocks_free = await blocks_free_latencies(backend, metrics, extra[1:])
    after, then = await metrics.read(), before.histogram(STOP_TO_ENDED)
    now = after.histogram(STOP_TO_ENDED) if after is not None else None
    stops = now.since(then) if now is not None and then is not None and now.bounds == then.bounds else None
    return Result(model, run, ServerMeasurements(cpu_seconds, stops, blocks_free))


def _rise(name: str, before: Scrape | None, after: Scrape | None) -> float | None:
    """Return by how much a counter rose between two readings; None if one of them does not have it."""
    if before is None or after is None or name not in before.values or name not in after.values:
        return None
    return after.values[name] - before.values[name]


async def blocks_free_latencies(backend: Backend, metrics: ServerMetrics, prompts: Sequence[str]) -> list[float]:
    """Seconds from a client's leaving until no KV block is in use, by the server's gauge; one client after the other.

    Each client leaves at its first piece of text. The times include the reading of the gauge. Empty if the gauge is
    absent or other clients keep the server busy; if the blocks are not free within 10 s, the list ends with infinity.
    """
    latencies: list[float] = []
    if not await _wait_until_idle(metrics):
        return latencies
    for prompt in prompts:
        sample = await take_sample(backend, Job(prompt, 0.0, Departure(Moment.IN_THE_MIDDLE)), trio.current_time())
        left = trio.current_time()
        if sample.end is not End.LEFT:
            continue  # its whole answer came in one piece
        if not await _wait_until_idle(metrics):
            return [*latencies, float("inf")]
        latencies.append(trio.current_time() - left)
    return latencies


async def _wait_until_idle(metrics: ServerMetrics) -> bool:
    """False if the server has no such gauges, or after PATIENCE."""
    with trio.move_on_after(PATIENCE):
        while (scrape := await metrics.read()) is not None and KV_USAGE in scrape.values:
            if all(scrape.values.get(name, 0.0) == 0 for name in (KV_USAGE, RUNNING, WAITING)):
                return True
            await trio.sleep(POLL)
    return False


async def _open_backend(config: BenchConfig, server: Endpoint) -> tuple[Backend, str | None]:
    if config.backend_kind is BackendKind.REALTIME:
        return Realtime(server, config, config.model), config.model
    model = config.model or await _first_model(server, config)
    return Completions(server, config, model), model


async def _first_model(server: Endpoint, config: BenchConfig) -> str:
    try:
        status, body = await fetch(server, "GET", config.base_path + "/v1/models")
    except RequestError as exc:
        has_url = config.base_url.rstrip("/") in str(exc)
        raise EngineError(str(exc) if has_url else f"{config.base_url}: {exc}") from exc
    unlisted = f"{config.base_url} does not list its models"
    if status != 200:
        remedy = "; use --model" if status == 404 else ""
        raise EngineError(f"{unlisted}: {describe_error(status, body)}{remedy}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        raise EngineError(f"{unlisted}; use --model") from exc
