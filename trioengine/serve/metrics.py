"""A histogram as plain numbers: to observe takes half a microsecond, and rendering waits for the scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from trioengine.actors.engine import Engine
from trioengine.actors.observer import FinishedRequest, Observer
from trioengine.actors.statistics import Statistics
from trioengine.core.types import Usage
from trioengine.serve.body import DisconnectCounter
from trioengine.serve.limits import ByteBudget


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


_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))  # 1, 8, 16 … 16384
_REQUEST_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # 1, 2, 5 … 500000
_STOP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20)


class Kind(NamedTuple):
    """What a histogram shows."""

    help: str
    bounds: tuple[float, ...]


HISTOGRAMS: Mapping[str, Kind] = {
    "time_to_first_token_seconds": Kind("Seconds from a request's beginning to its first token", _FIRST_TOKEN),
    "inter_token_latency_seconds": Kind("Seconds between two tokens of an answer", _BETWEEN_TOKENS),
    "e2e_request_latency_seconds": Kind("Seconds from a finished request's beginning to its last token", _REQUEST),
    "request_queue_time_seconds": Kind("Seconds from a request's arrival at the worker to its first step", _REQUEST),
    "request_prefill_time_seconds": Kind("Seconds from a request's first step to its first token", _REQUEST),
    "request_decode_time_seconds": Kind("Seconds from a finished request's first token to its last", _REQUEST),
    "iteration_tokens": Kind("Tokens of prompts and answers computed in a step", _STEP_TOKENS),
    "request_prompt_tokens": Kind("Tokens of a finished request's prompt", _REQUEST_TOKENS),
    "request_generation_tokens": Kind("Tokens of a finished request's answer", _REQUEST_TOKENS),
    "stop_to_ended_seconds": Kind("Seconds from a posted STOP or END until the worker let go", _STOP),
}


class Histograms(Observer):
    """All of them, by name; and how many requests went on after the loss of a worker."""

    def __init__(self) -> None:
        self.by_name = {name: Histogram(kind.bounds) for name, kind in HISTOGRAMS.items()}
        self.num_resumed = 0
        self._next_tokens = self.by_name["inter_token_latency_seconds"]

    def step(self, num_tokens: int) -> None:
        self._observe("iteration_tokens", num_tokens)

    def first_token(self, seconds: float, usage: Usage | None) -> None:
        self._observe("time_to_first_token_seconds", seconds)
        if usage is not None:
            self._observe("request_queue_time_seconds", usage.queue_time)
            self._observe("request_prefill_time_seconds", usage.prefill_time)

    def next_tokens(self, seconds: float) -> None:
        self._next_tokens.observe(seconds)

    def request_resumed(self) -> None:
        self.num_resumed += 1

    def request_finished(self, request: FinishedRequest) -> None:
        self._observe("e2e_request_latency_seconds", request.seconds)
        self._observe("request_decode_time_seconds", request.decode_seconds)
        self._observe("request_prompt_tokens", request.prompt_tokens)
        self._observe("request_generation_tokens", request.generation_tokens)

    def session_stopped(self, seconds: float) -> None:
        self._observe("stop_to_ended_seconds", seconds)

    def _observe(self, name: str, value: float) -> None:
        self.by_name[name].observe(value)


PREFIX = "trioengine_"
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Count(NamedTuple):
    """What a gauge or a counter shows, and where the books have it."""

    help: str
    read: Callable[[Statistics], float]


class CountBy(NamedTuple):
    """A counter for each value of a label."""

    help: str
    label: str
    read: Callable[[Statistics], Mapping[str, int]]


def _kv_cache_usage(statistics: Statistics) -> float:
    total = statistics.kv_blocks_total
    unused = statistics.kv_blocks_free + statistics.kv_blocks_cached
    return (total - unused) / total if total else 0.0


SLEEP_STATES = {None: "awake", 1: "weights_offloaded", 2: "discard_all"}  # by the level; vLLM's names
GAUGES: Mapping[str, Count] = {
    "num_requests_running": Count("Requests that have a token and are not over", lambda counts: counts.running),
    "num_requests_waiting": Count(
        "Requests that are accepted and have no token yet", lambda counts: counts.preparing + counts.waiting
    ),
    "num_requests_suspended": Count(
        "Requests that have no worker, and go on when there is one", lambda counts: counts.suspended
    ),
    "num_sessions": Count("Sessions that have a slot", lambda counts: counts.sessions),
    "payload_bytes_inflight": Count(
        "Bytes of images that are prepared, on their way to the worker, or of a suspended request",
        lambda counts: counts.payload_bytes_inflight,
    ),
    "payload_bytes_kept": Count("Bytes of images kept for later turns", lambda counts: counts.payload_bytes_kept),
    "kv_cache_usage_perc": Count("KV blocks that requests hold, of all: 0 to 1", _kv_cache_usage),
}
COUNTERS: Mapping[str, Count] = {
    "prompt_tokens": Count("Tokens of prompts whose answers have begun", lambda counts: counts.prompt_tokens),
    "generation_tokens": Count("Tokens generated by the workers", lambda counts: counts.generation_tokens),
    "prefix_cache_queries": Count("Tokens looked up in the prefix cache", lambda counts: counts.prefix_cache_queries),
    "prefix_cache_hits": Count("Tokens found in the prefix cache", lambda counts: counts.prefix_cache_hits),
    "encoder_cache_queries": Count(
        "Images looked up in the encoder cache", lambda counts: counts.encoder_cache_queries
    ),
    "encoder_cache_hits": Count("Images found in the encoder cache", lambda counts: counts.encoder_cache_hits),
    "num_preemptions": Count("Requests preempted for want of KV blocks", lambda counts: counts.preemptions),
    "worker_restarts": Count("Workers started in place of one that was lost", lambda counts: counts.restarts),
}
COUNTERS_BY: Mapping[str, CountBy] = {
    "request_success": CountBy(
        "Requests that are over, by how they ended",
        "finished_reason",
        lambda counts: {reason.value: count for reason, count in counts.finish_reasons.items()},
    ),
    "requests_aborted": CountBy(
        "Requests that were aborted, by the cause",
        "cause",
        lambda counts: {cause.value: count for cause, count in counts.abort_causes.items()},
    ),
}


class Metrics(Collector):
    """Watches an engine from now on; `render` is what a scrape gets. It waits for nobody, also not for a worker."""

    def __init__(self, engine: Engine, disconnects: DisconnectCounter, budget: ByteBudget) -> None:
        self.histograms = Histograms()
        self._engine = engine
        self._disconnects = disconnects
        self._budget = budget
        self._registry = CollectorRegistry()
        self._registry.register(self)
        engine.observers.append(self.histograms)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not collect to know the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        statistics = self._engine.statistics()
        for name, count in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, count.help, count.read(statistics))
        help_ = "Bytes of bodies and of WebSocket connections that the server holds"
        yield GaugeMetricFamily(PREFIX + "buffered_bytes", help_, self._budget.num_bytes)
        yield from self._of_power()
        for name, count in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, count.help, count.read(statistics))
        help_ = "Clients that went away with something in flight"
        yield CounterMetricFamily(PREFIX + "client_disconnected", help_, self._disconnects.count)
        help_ = "Times that a request went on with another worker after one was lost"
        yield CounterMetricFamily(PREFIX + "requests_resumed", help_, self.histograms.num_resumed)
        for name, count_by in COUNTERS_BY.items():
            family = CounterMetricFamily(PREFIX + name, count_by.help, labels=[count_by.label])
            for value, number in count_by.read(statistics).items():
                family.add_metric([value], number)
            yield family
        for name, histogram in self.histograms.by_name.items():
            yield HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name].help, histogram.buckets, histogram.sum)

    def _of_power(self) -> Iterator[Metric]:
        state = self._engine.power
        help_ = "Whether the engine is in this state: 1 for one of them"
        family = GaugeMetricFamily(PREFIX + "engine_sleep_state", help_, labels=["state"])
        for level, name in SLEEP_STATES.items():
            family.add_metric([name], level == state.level)
        yield family
        yield GaugeMetricFamily(PREFIX + "weight_version", "Which weights the model has: 1, 2, …", state.weight_version)
