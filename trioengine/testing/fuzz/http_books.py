"""The requests and connections of all HTTP clients of one server, counted against its limits, and its metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trioengine.actors.generation import Generation
from trioengine.actors.observer import Observer, Slot
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineOverloaded
from trioengine.core.types import Cause, FinishReason
from trioengine.serve.config import ServeConfig
from trioengine.testing.fuzz.shapes import longest_prefix

KEYS, ADMIN_KEY = ("key-a", "key-b", "key-c"), "key-of-the-operator"
EMPTY = ("num_requests_running", "num_requests_waiting", "num_requests_suspended", "num_sessions", "buffered_bytes")
SERVED_BEYOND = (  # on connections beyond the limit too
    *("/health", "/ready", "/is_sleeping", "/debug/invariants"),
    *("/abort_request", "/sleep", "/wake_up", "/wakeup", "/update_weights"),
)
_LINE = re.compile(r"trioengine_(\w+)(?:\{(.*)\})? (\S+)")
_UNITS = ("_total", "_count", "_sum", "_bucket")  # of metrics that only grow


class Request(NamedTuple):
    """A request as it is sent: with this key, or none; the key is in `key_header`."""

    method: str
    target: str
    body: bytes = b""
    key: str | None = None
    key_header: str = "authorization"
    accept: str | None = None


@dataclass(eq=False)
class Use:
    """A request's part of the server's limits, and the most that all requests used together while it was there."""

    size: int
    key: str | None
    is_gone: Callable[[], bool]  # whether its connection was closed
    num_sessions: int = 1  # at most
    is_over: bool = False
    most_bytes: int = 0
    most_sessions_of_key: int = 0
    most_bytes_of_key: int = 0
    most_connections: int = 0


class HttpBooks(Observer):
    """The model of the server's limits: an upper bound, as a request counts until all tasks have come to rest."""

    def __init__(self, config: ServeConfig, engine: EngineConfig, model: str) -> None:
        self.config = config
        self.model = model
        slots = engine.max_num_seqs + engine.max_num_queued_reqs
        self.most_choices = min(config.max_sessions_per_key, engine.max_sessions, slots)  # of a prompt
        self.max_bytes = config.max_buffered_bytes  # of all, and of a key
        self.is_closing = False  # the server closes connections that are idle
        self._connections: list[Use] = []
        self._requests: list[Use] = []
        self._histories: list[tuple[str, Sequence[int], Sequence[Sequence[int]]]] = []  # key, prompt and answers
        self._num_full = 0  # times that the engine was full
        self._num_refused = 0  # clients that were refused for that

    # ---- limits -----------------------------------------------------------------------------------------------------

    def connected(self, is_gone: Callable[[], bool]) -> Use:
        """Count a new connection."""
        use = Use(0, None, is_gone)
        self._connections.append(use)
        for each in self._connections:
            each.most_connections = max(each.most_connections, len(self._connections))
        return use

    def sent(self, request: Request, is_gone: Callable[[], bool], num_sessions: int = 1) -> Use:
        """Count a new request, which takes no more sessions than these."""
        use = Use(len(request.body), request.key, is_gone, num_sessions)
        self._requests.append(use)
        num_bytes = sum(each.size for each in self._requests)
        for each in self._requests:
            each.most_bytes = max(each.most_bytes, num_bytes)
            of_key = [other for other in self._requests if other.key == each.key]
            each.most_bytes_of_key = max(each.most_bytes_of_key, sum(other.size for other in of_key))
            num_of_key = sum(other.num_sessions for other in of_key)
            each.most_sessions_of_key = max(each.most_sessions_of_key, num_of_key)
        return use

    def rest(self) -> None:
        """No task can run: requests that are over, and connections that are closed, use nothing any more."""
        self._connections = [use for use in self._connections if not use.is_gone()]
        self._requests = [use for use in self._requests if not (use.is_over or use.is_gone())]

    def is_reached(self, code: str, request: Use, connection: Use) -> bool:
        """Whether the limit that a refusal names may have been reached."""
        config = self.config
        match code:
            case "too_many_connections":
                return connection.most_connections > config.max_connections
            case "too_many_sessions":
                return request.key is not None and request.most_sessions_of_key > config.max_sessions_per_key
            case "key_buffers_full":
                return request.key is not None and request.most_bytes_of_key > self.max_bytes
            case "buffers_full":
                return request.most_bytes > self.max_bytes
        return False

    # ---- the prefix cache, and full engines -----------------------------------------------------------------------

    def asked(self, key: str, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> int:
        """Note a prompt and the answers of its choices; returns its number."""
        self._histories.append((key, prompt, answers))
        return len(self._histories) - 1

    def most_cached(self, number: int) -> int:
        """How many tokens of a prompt may be found in the prefix cache: requests of other keys share none."""
        key, prompt, _ = self._histories[number]
        others = (
            (*ids, *answer)
            for index, (owner, ids, answers) in enumerate(self._histories)
            if owner == key and index != number
            for answer in answers
        )
        return min(longest_prefix(prompt, others), len(prompt) - 1)

    def slot_refused(self, slot: Slot, error: Exception) -> None:
        if isinstance(error, EngineOverloaded):
            self._num_full += error.is_full

    def refused(self) -> None:
        """A client is refused a slot: the engine was full, once for each of these clients."""
        self._num_refused += 1
        assert self._num_refused <= self._num_full, (
            f"{self._num_refused} clients are refused with 429, the engine was full {self._num_full} times"
        )


# ---- metrics ------------------------------------------------------------------------------------------------------


class Metrics(NamedTuple):
    """The values of a scrape, by name and labels."""

    values: Mapping[tuple[str, str], float]

    @staticmethod
    def parse(text: str) -> Metrics:
        """Parse Prometheus' text format. Raises AssertionError."""
        values: dict[tuple[str, str], float] = {}
        assert text.endswith("\n"), "the last line of the metrics is torn"
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            found = _LINE.fullmatch(line)
            assert found, f"no metric of this server: {line!r}"
            name, labels, value = found.groups("")
            assert (name, labels) not in values, f"twice: {line!r}"
            values[name, labels] = float(value)
        return Metrics(values)

    def of(self, name: str, labels: str = "") -> float:
        """The value of a metric. AssertionError without it."""
        assert (name, labels) in self.values, f"there is no metric {name} {labels}"
        return self.values[name, labels]

    def sum_of(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for (each, _), value in self.values.items() if each == name)

    def check(self, before: Metrics | None) -> None:
        """The counts balance, histograms rise, and nothing that only grows is less than in the scrape `before`."""
        aborted = self.of("request_success_total", 'finished_reason="abort"')
        assert self.sum_of("requests_aborted_total") == aborted, f"aborts by cause are not the {aborted} aborts"
        assert self.sum_of("engine_sleep_state") == 1, "the engine is in one state of sleep"
        for name, count in self.values.items():
            if name[0].endswith("_count"):
                self._check_histogram(name[0].removesuffix("_count"), count)
        for name, value in (before.values if before is not None else {}).items():
            if name[0].endswith(_UNITS):
                assert self.values.get(name, 0.0) >= value, f"{name} was {value}, and is {self.values.get(name)}"

    def _check_histogram(self, name: str, count: float) -> None:
        buckets = [value for (each, _), value in self.values.items() if each == f"{name}_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == count, f"the buckets of {name} are {buckets}, of {count}"


@dataclass
class Tally:
    """Counts of all requests of a server, by their outcomes, as its callers got them."""

    finished: Counter[FinishReason] = field(default_factory=Counter)
    causes: Counter[Cause] = field(default_factory=Counter)
    prompt_tokens: int = 0  # of the answers that ended by themselves
    answer_tokens: int = 0
    has_stops: bool = False  # tokens behind a stop string are generated, and in no answer

    @staticmethod
    def of(generations: Iterable[Generation]) -> Tally:
        """Count requests that have an outcome."""
        tally = Tally()
        for generation in generations:
            if (outcome := generation.outcome) is None:
                continue
            tally.finished[outcome.finish_reason] += 1
            if outcome.cause is not None:
                tally.causes[outcome.cause] += 1
            if outcome.is_complete:
                tally.prompt_tokens += generation.completion.usage.prompt_tokens
                tally.answer_tokens += generation.completion.usage.completion_tokens
            tally.has_stops |= bool(generation.params.stop)
        return tally

    def check(self, metrics: Metrics, *, is_calm: bool) -> None:
        """Check the metrics when all clients have gone; `is_calm`: no token was lost, or computed twice."""
        whole = self.finished[FinishReason.STOP] + self.finished[FinishReason.LENGTH]
        due = {
            **{
                ("request_success_total", f'finished_reason="{name.value}"'): self.finished[name]
                for name in FinishReason
            },
            **{("requests_aborted_total", f'cause="{cause.value}"'): self.causes[cause] for cause in Cause},
            ("request_prompt_tokens_sum", ""): self.prompt_tokens,
            ("request_generation_tokens_sum", ""): self.answer_tokens,
            **{(f"{name}_count", ""): whole for name in ("e2e_request_latency_seconds", "request_generation_tokens")},
            **{(name, ""): 0 for name in EMPTY},
        }
        if is_calm and whole == sum(self.finished.values()):
            due |= {("prompt_tokens_total", ""): self.prompt_tokens, ("time_to_first_token_seconds_count", ""): whole}
            if not self.has_stops:
                due["generation_tokens_total", ""] = self.answer_tokens
        for (name, labels), value in due.items():
            found = metrics.of(name, labels)
            assert found == value, f"the metric {name} {labels} is {found:g}, and not {value}"
