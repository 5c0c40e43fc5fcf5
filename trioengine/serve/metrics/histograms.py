"""What a server observes of its engine: histograms, and a count that the books have not.

Names and buckets are vLLM's, where it has the metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trioengine.actors.observer import FinishedRequest, Observer
from trioengine.core.types import Usage
from trioengine.serve.metrics.histogram import Histogram

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
