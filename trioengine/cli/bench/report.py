"""The results of a run: summarized by vLLM's definitions, as JSON with vLLM's names, as a table, and as a plot.

Only completed requests count. TPOT has no value for an answer of one token; ITL has one for each gap, of all requests
together. A request is good if it meets every goal.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from trioengine.cli.bench.backends import ScrapedHistogram
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.load import End, LengthUnit, Run, Sample
from trioengine.core.errors import InvalidConfig

Point: TypeAlias = tuple[float, float]
MAX_POINTS = 200  # of a curve
_NOT_REPORTED = ("api_key", "percentile_metrics", "metric_percentiles")
_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_SUFFIXES = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Distribution:
    """Times, in seconds; `percentiles` by their number."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
        """Zeros if there are no values."""
        ordered = sorted(values) or [0.0]
        return cls(
            mean=statistics.fmean(ordered),
            median=statistics.median(ordered),
            std=statistics.pstdev(ordered),
            percentiles={p: percentile(ordered, p) for p in percentiles},
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run; rates are per second. `request_goodput` is None without goals."""

    duration: float
    completed: int
    left: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_concurrent_requests: int
    distributions: Mapping[str, Distribution]


@dataclass(frozen=True, slots=True)
class ServerMeasurements:
    """The server's own measurements; None or empty if it does not have them."""

    cpu_seconds: float | None = None  # CPU time of its process during the run
    stop_to_ended: ScrapedHistogram | None = None  # of this run's stops
    blocks_free: Sequence[float] = ()  # seconds from a client's leaving


def summarize(
    run: Run, metrics: Sequence[str], percentiles: Sequence[float], goals: Mapping[str, float] | None = None
) -> Summary:
    """`metrics` are some of ttft, tpot, itl and e2el; `goals` their limits, in seconds."""
    completed = [sample for sample in run.samples if sample.end is End.COMPLETED]
    seconds = max(run.seconds, 1e-9)
    tokens_in, tokens_out = (sum(getattr(s, f"{kind}_tokens") for s in completed) for kind in ("prompt", "output"))
    return Summary(
        duration=run.seconds,
        completed=len(completed),
        left=sum(sample.end is End.LEFT for sample in run.samples),
        failed=sum(sample.end is End.FAILED for sample in run.samples),
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=len(completed) / seconds,
        request_goodput=sum(_is_good(sample, goals) for sample in completed) / seconds if goals else None,
        output_throughput=tokens_out / seconds,
        total_token_throughput=(tokens_in + tokens_out) / seconds,
        max_concurrent_requests=run.max_concurrency,
        distributions={name: Distribution.of(_values(completed, name), percentiles) for name in metrics},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of ascending values, interpolated between two of them."""
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def as_json_object(
    config: BenchConfig, model: str | None, unit: LengthUnit, summary: Summary, server: ServerMeasurements
) -> dict[str, Any]:
    """Everything but the single requests; times in milliseconds, named as in vLLM's result."""
    load = {name: _plain(value) for name, value in asdict(config).items() if name not in _NOT_REPORTED}
    names = [field.name for field in fields(summary) if field.name != "distributions"]
    rates = {name: _plain(getattr(summary, name)) for name in names}
    report = {**load, "endpoint": config.path, "model": model, "prompt_length_in": unit.name.lower(), **rates}
    for name, distribution in summary.distributions.items():
        report |= {f"{kind}_{name}_ms": value for kind, value in _statistics(distribution)}
    if server.cpu_seconds is not None:
        report["server_cpu_seconds"] = _plain(server.cpu_seconds)
    stops = server.stop_to_ended
    if stops is not None:
        report |= {
            "stops": int(stops.count),
            "mean_stop_to_ended_ms": _ms(stops.mean),
            **{f"p{p:g}_stop_to_ended_ms": _ms(stops.quantile(p)) for p in config.percentiles},
        }
    if server.blocks_free:
        report["disconnect_to_blocks_free_ms"] = [_plain(_ms(seconds)) for seconds in server.blocks_free]
    return report


def requests_of(run: Run) -> list[dict[str, Any]]:
    """The single requests for the JSON, times in seconds."""
    return [
        {
            "end": sample.end.value,
            "began": sample.began,
            "ttft": sample.ttft,
            "e2el": sample.e2el,
            "itl": list(sample.itl),
            "prompt_tokens": sample.prompt_tokens,
            "output_tokens": sample.output_tokens,
            "error": sample.error,
        }
        for sample in run.samples
    ]


def errors_of(run: Run) -> Mapping[str, int]:
    """The number of requests that failed with each error."""
    errors: dict[str, int] = {}
    for sample in run.samples:
        if sample.end is End.FAILED:
            errors[str(sample.error)] = errors.get(str(sample.error), 0) + 1
    return errors


def print_table(unit: LengthUnit, summary: Summary, server: ServerMeasurements) -> None:
    """Print the report for a reader to stdout."""
    console = Console(highlight=False)
    console.print(_rates(unit, summary, server), "", _latencies(summary), sep="\n")


def check_plot(path: Path) -> None:
    """Raises InvalidConfig for a plot that cannot be drawn; before a run, not after it."""
    if path.suffix not in _SUFFIXES:
        raise InvalidConfig.of("plot", f"must be a file that ends in {' or '.join(_SUFFIXES)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfig.of("plot", "needs matplotlib: pip install matplotlib")


def plot_latencies(run: Run, metrics: Sequence[str], path: Path) -> None:
    """Draw, for each metric of the completed requests, the share of values up to each time."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    completed = [sample for sample in run.samples if sample.end is End.COMPLETED]
    figure = Figure(figsize=(4 * len(metrics), 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        times = sorted(1000 * value for value in _values(completed, metric))
        axes.step(times, [(rank + 1) / len(times) for rank in range(len(times))], where="post")
        axes.set(title=metric.upper(), xlabel="ms", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("share")
    figure.savefig(path)


def plot_over_time(
    curves: Mapping[str, Sequence[Point]], shaded: Sequence[tuple[float, float]], path: Path, *, unit: str
) -> None:
    """Draw curves over seconds, by their labels, with some spans of time shaded; a small file for any length."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, points in curves.items():
        axes.plot(*zip(*thinned(points), strict=True), label=label)
    for begin, end in shaded:
        axes.axvspan(begin, end, alpha=0.1)
    axes.set(xlabel="s", ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    axes.grid(visible=True, alpha=0.3)
    with rc_context({"svg.fonttype": "none"}):  # letters as text
        figure.savefig(path)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS of a curve's points: the lowest and the highest of each part of it."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = -(-2 * len(points) // MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [point for part in parts for point in sorted({min(part, key=_height), max(part, key=_height)})]


def _height(point: Point) -> float:
    return point[1]


def _values(samples: Sequence[Sample], metric: str) -> list[float]:
    """All values of a metric, in seconds."""
    match metric:
        case "itl":
            return [gap for sample in samples for gap in sample.itl]
        case "tpot":
            return [sample.tpot for sample in samples if sample.output_tokens > 1]
        case _:
            return [getattr(sample, metric) for sample in samples]


def _is_good(sample: Sample, goals: Mapping[str, float]) -> bool:
    """ITL: the longest gap counts."""
    return all(max(_values([sample], name), default=0.0) <= limit for name, limit in goals.items())


def _statistics(distribution: Distribution) -> list[tuple[str, float]]:
    figures = [("mean", distribution.mean), ("median", distribution.median), ("std", distribution.std)]
    figures += [(f"p{percent:g}", value) for percent, value in distribution.percentiles.items()]
    return [(kind, _ms(value)) for kind, value in figures]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _plain(value: Any) -> Any:
    """A value of JSON; infinity becomes a word, as in vLLM's result."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else "inf"
    return getattr(value, "value", value)


def _rates(unit: LengthUnit, summary: Summary, server: ServerMeasurements) -> Table:
    table = Table(show_header=False, box=None)
    goodput = summary.request_goodput
    rows: list[tuple[str, str | None]] = [
        ("requests completed", f"{summary.completed}"),
        ("clients that left", f"{summary.left}" if summary.left else None),
        ("requests failed", f"{summary.failed}" if summary.failed else None),
        ("most in flight at once", f"{summary.max_concurrent_requests}"),
        ("duration", f"{summary.duration:.2f} s"),
        ("prompt length in", unit.value),
        ("prompt tokens", f"{summary.total_input_tokens}"),
        ("output tokens", f"{summary.total_output_tokens}"),
        ("requests", f"{summary.request_throughput:.2f}/s"),
        ("goodput", None if goodput is None else f"{goodput:.2f} requests/s"),
        ("output tokens", f"{summary.output_throughput:.2f}/s"),
        ("tokens in and out", f"{summary.total_token_throughput:.2f}/s"),
        ("CPU time of the server's process", _cpu(server.cpu_seconds, summary.total_output_tokens)),
        ("stop to ended", _stops(server.stop_to_ended)),
        ("disconnect to blocks free", _blocks_free(server.blocks_free)),
    ]
    for name, value in rows:
        if value is not None:
            table.add_row(name, value)
    return table


def _cpu(seconds: float | None, num_tokens: int) -> str | None:
    if seconds is None:
        return None
    share = f", {seconds / num_tokens * 1e6:.1f} µs for each output token" if num_tokens else ""
    return f"{seconds:.2f} s{share}"


def _stops(stops: ScrapedHistogram | None) -> str | None:
    if stops is None or not stops.count:
        return None
    return f"{_ms(stops.mean):.1f} ms on average, p99 {_ms(stops.quantile(99)):.1f} ms, {stops.count:.0f} stops"


def _blocks_free(latencies: Sequence[float]) -> str | None:
    if not latencies:
        return None
    ordered = sorted(latencies)
    return f"median {_ms(ordered[len(ordered) // 2]):.1f} ms, most {_ms(ordered[-1]):.1f} ms"


def _latencies(summary: Summary) -> Table:
    table = Table("milliseconds", box=None)
    for kind in [kind for kind, _ in _statistics(next(iter(summary.distributions.values())))]:
        table.add_column(kind, justify="right")
    for name, distribution in summary.distributions.items():
        table.add_row(f"{_TITLES[name]} ({name.upper()})", *(f"{value:.2f}" for _, value in _statistics(distribution)))
    return table
