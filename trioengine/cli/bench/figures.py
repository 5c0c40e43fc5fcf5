"""What a run's samples come to, by vLLM's definitions.

Only completed requests count. TPOT has no value for an answer of one token; ITL has one for each gap, of all requests
together. A request is good when it meets every goal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trioengine.cli.bench.load import Run
from trioengine.cli.bench.sample import End, Sample


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of times, in seconds; `percentiles` by their number."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
        """Zeros where there are no values."""
        ordered = sorted(values) or [0.0]
        return cls(
            mean=statistics.fmean(ordered),
            median=statistics.median(ordered),
            std=statistics.pstdev(ordered),
            percentiles={p: percentile(ordered, p) for p in percentiles},
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates are a second. `request_goodput` is None without goals."""

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


def figures(
    run: Run, metrics: Sequence[str], percentiles: Sequence[float], goals: Mapping[str, float] | None = None
) -> Figures:
    """`metrics` are some of ttft, tpot, itl and e2el; `goals` their limits, in seconds."""
    completed = [sample for sample in run.samples if sample.end is End.COMPLETED]
    seconds = max(run.seconds, 1e-9)
    tokens_in, tokens_out = (sum(getattr(s, f"{kind}_tokens") for s in completed) for kind in ("prompt", "output"))
    return Figures(
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
        distributions={name: Distribution.of(values(completed, name), percentiles) for name in metrics},
    )


def values(samples: Sequence[Sample], metric: str) -> list[float]:
    """All that there are of a metric, in seconds."""
    match metric:
        case "itl":
            return [gap for sample in samples for gap in sample.itl]
        case "tpot":
            return [sample.tpot for sample in samples if sample.output_tokens > 1]
        case _:
            return [getattr(sample, metric) for sample in samples]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between two values, in proportion."""
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def _is_good(sample: Sample, goals: Mapping[str, float]) -> bool:
    """ITL: the longest gap counts."""
    return all(max(values([sample], name), default=0.0) <= limit for name, limit in goals.items())
