"""The configuration of `bench serve`: the server, the load and the report."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from trioengine.core.checks import MAX_COUNT, integer, is_key, number
from trioengine.core.errors import InvalidConfig
from trioengine.core.wording import brief

CHAT, COMPLETIONS, REALTIME = "/v1/chat/completions", "/v1/completions", "/v1/realtime"
METRICS = ("ttft", "tpot", "itl", "e2el")
MAX_RATE = 10**6
_INTEGERS = {
    "num_prompts": 1,
    "random_input_len": 1,
    "random_output_len": 1,
    "max_concurrency": 1,
    "idle_sessions": 0,
    "seed": 0,
}


class BackendKind(enum.Enum):
    """The server's protocol."""

    OPENAI = "openai"
    REALTIME = "realtime"


HELP = {  # of the flags
    "base_url": "The server, with or without /v1 at the end.",
    "backend": "openai: HTTP and server-sent events; realtime: WebSocket.",
    "endpoint": f"The path; {CHAT}, {COMPLETIONS} or, for realtime, {REALTIME}.",
    "model": "The server's name for its model; without it, the first that it lists.",
    "api_key": "Sent as a bearer token.",
    "num_prompts": "Requests.",
    "random_input_len": "Tokens of each prompt, before the chat template adds its own.",
    "random_output_len": "Tokens of each answer, at most.",
    "request_rate": "Requests a second, as they come by chance; inf: all at once.",
    "burstiness": "1: a Poisson process; less: in bursts; more: evenly.",
    "max_concurrency": "Requests in flight at a time; with rate inf, a closed loop.",
    "temperature": "0 is greedy.",
    "ignore_eos": "Every answer has its full length (trioengine and vLLM support it).",
    "seed": "The same seed makes the same load.",
    "leave": "Percent of the clients that leave before their answer is complete.",
    "idle_sessions": "WebSockets beside the load that are open and silent (trioengine's).",
    "goodput": "METRIC:MILLISECONDS, such as ttft:200; several: all must be met.",
    "percentile_metrics": "Which of these are reported.",
    "metric_percentiles": "Which percentiles, such as 50,90,99.",
}


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The load of `bench serve`; InvalidConfig names the field that cannot be used. The flags are vLLM's."""

    base_url: str = "http://127.0.0.1:8000"
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    num_prompts: int = 64
    random_input_len: int = 128
    random_output_len: int = 128
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    leave: float = 0.0
    idle_sessions: int = 0
    goodput: tuple[str, ...] = ()
    percentile_metrics: str = ",".join(METRICS)
    metric_percentiles: str = "99"

    def __post_init__(self) -> None:
        if self.backend not in [kind.value for kind in BackendKind]:
            raise _bad("backend", f"must be openai or realtime, got {brief(self.backend)}")
        for name, low in _INTEGERS.items():
            if name != "max_concurrency" or self.max_concurrency is not None:
                self._validate(name, integer, low, MAX_COUNT)
        if self.request_rate != math.inf:
            self._validate("request_rate", _positive, MAX_RATE)
        self._validate("burstiness", _positive, MAX_RATE)
        self._validate("temperature", number, 0, 2)
        self._validate("leave", number, 0, 100)
        if self.api_key is not None and not is_key(self.api_key):
            raise _bad("api_key", "must be one key of visible ASCII characters")
        for parsed in (self.url, self.path, self.goals, self.metrics, self.percentiles):
            del parsed  # they raise

    def _validate(self, name: str, check: Callable[..., object], *bounds: float) -> None:
        try:
            object.__setattr__(self, name, check(getattr(self, name), *bounds))
        except ValueError as exc:
            raise _bad(name, str(exc)) from None

    @property
    def url(self) -> SplitResult:
        """The server's URL, parsed."""
        try:
            url = urlsplit(self.base_url)
            has_more = url.query or url.fragment or url.username is not None
            if url.scheme in ("http", "https") and url.hostname and url.port != 0 and not has_more:
                return url
        except ValueError:  # no port, or no address
            pass
        raise _bad("base_url", f"must be http(s)://HOST[:PORT][/PATH], got {brief(self.base_url)}")

    @property
    def backend_kind(self) -> BackendKind:
        """The server's protocol."""
        return BackendKind(self.backend)

    @property
    def base_path(self) -> str:
        """The path before the endpoints' own, without the /v1 that OpenAI's clients add."""
        return self.url.path.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        if self.backend_kind is BackendKind.REALTIME:
            endpoint, known = self.endpoint or REALTIME, ("/realtime",)
        else:
            endpoint, known = self.endpoint or CHAT, ("/completions",)
        if not endpoint.startswith("/") or not endpoint.isascii() or not endpoint.endswith(known):
            raise _bad("endpoint", f"must be a path that ends in {known[0]}, got {brief(endpoint)}")
        return (self.base_path if endpoint.startswith("/v1/") else self.url.path.rstrip("/")) + endpoint

    @property
    def goals(self) -> Mapping[str, float]:
        """The limits that `--goodput` sets, in seconds, by metric."""
        goals: dict[str, float] = {}
        for goal in self.goodput:
            metric, _, limit = goal.partition(":")
            if metric not in METRICS or metric in goals or not limit:
                raise _bad(
                    "goodput", f"must be one METRIC:MILLISECONDS each of {', '.join(METRICS)}, got {brief(goal)}"
                )
            goals[metric] = _number(limit, "goodput", 10**9) / 1000
        return goals

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that are reported."""
        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        if unknown := [name for name in names if name not in METRICS]:
            raise _bad("percentile_metrics", f"must be among {', '.join(METRICS)}, got {brief(unknown[0])}")
        return names

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles that are reported."""
        return tuple(_number(value, "metric_percentiles", 100) for value in self.metric_percentiles.split(","))


def goodput_of(option: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """The goals of `--goodput` and of the arguments after it, as in vLLM. Raises InvalidConfig for other arguments."""
    for argument in arguments:
        metric, colon, _ = argument.partition(":")
        if option and (metric in METRICS or (colon and "://" not in argument)):
            continue
        remedy = ""
        if colon:
            remedy = f": use --goodput {argument}" if metric in METRICS else ": a server is --base-url"
        raise InvalidConfig(f"unexpected argument {brief(argument)}{remedy}. See trioengine bench serve --help.")
    return (*option, *arguments)


def _positive(value: Any, high: float) -> float:
    return number(value, 0, high, above=True)


def _number(text: str, name: str, high: float) -> float:
    try:
        return number(float(text), 0, high)
    except ValueError:
        raise _bad(name, f"must be numbers from 0 to {high}, got {brief(text)}") from None


def _bad(name: str, why: str) -> InvalidConfig:
    return InvalidConfig.of(name, why)
