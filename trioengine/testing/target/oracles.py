"""The oracles, most productive first, and the findings that they make; the known state of a server at rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trioengine.testing.target.dialects import Dialect
from trioengine.testing.target.wire import Answer, Response

ORACLES = {  # by name: the promise, in the order in which findings are reported
    "alive": "a server does not end by itself",
    "ends": "a server ends with status 0 at SIGTERM, in time, and its worker with it, even if the server is killed",
    "probe": "a short completion is answered in time",
    "rest": "gauges and the counter of tokens return to rest after the last close",
    "golden": "the greedy text of a fixed prompt does not change",
    "marker": "the marker of one request never appears in the answer to another",
    "whole": "each request that is left alone is answered whole, or refused",
    "usage": "usage agrees with the tokenizer and with the tokens received",
    "counters": "counters never decrease, and count each answer",
    "process": "memory and open files of the process do not grow without bound",
    "cached": "no cached token survives an update of the weights or a reset",
    "state": "the reported state equals the one that the operator's calls imply",
    "call": "each of the operator's calls is answered in time",
    "refusal": "a bad request is refused as one",
    "log": "the server logs no error",
}
FILES_SLACK = 16


@dataclass(frozen=True)
class Finding:
    """A broken promise, with its evidence."""

    oracle: str
    message: str

    @property
    def rank(self) -> int:
        return list(ORACLES).index(self.oracle)

    def __str__(self) -> str:
        return f"{self.oracle}: {self.message}"


@dataclass
class Golden:
    """The greedy answer to the fixed prompt, as it was before the search."""

    text: str | None = None  # None if it varies even alone
    in_crowd: bool = False  # whether it is the same beside other requests
    prompt_tokens: int | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Snapshot:
    """Figures of the server at one moment."""

    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)

    def complaints(self, rest: Snapshot, dialect: Dialect) -> list[str]:
        """Return the gauges that are above their value at `rest`."""
        tolerances = {gauge.name: gauge.tolerance for gauge in dialect.gauges}
        return [
            f"{name} is {self.gauges[name]:g}, at rest {before:g}"
            for name, before in rest.gauges.items()
            if name in self.gauges and self.gauges[name] > before + tolerances.get(name, 0.0)
        ]


def check_golden(answer: Answer, golden: Golden) -> list[Finding]:
    """Judge the golden prompt's answer; nearly equal log-probabilities are equal."""
    if golden.text is None or answer.error is not None:
        return []
    if answer.text != golden.text:
        return [Finding("golden", f"the answer was {golden.text!r:.120}, now it is {answer.text!r:.120}")]
    pairs = zip(golden.logprobs, answer.logprobs, strict=False)
    if any(abs(before - now) > 0.25 for before, now in pairs):
        return [Finding("golden", f"log-probabilities were {golden.logprobs}, now they are {answer.logprobs}")]
    return []


def check_markers(client: int, text: str, markers: Mapping[int, str]) -> list[Finding]:
    """Judge that a text has no marker of another request."""
    for other, marker in markers.items():
        if other != client and marker in text:
            message = f"the answer to client {client} has the marker {marker} of client {other}: {text!r:.120}"
            return [Finding("marker", message)]
    return []


def check_whole(client: int, response: Response, answer: Answer, may: tuple[int, ...], seconds: float) -> list[Finding]:
    """Judge the answer to a client that was left alone."""
    name = f"the request of client {client}"
    if not response.is_over:
        state = "not answered" if response.status is None else f"not ended after {answer.pieces} pieces"
        return [Finding("whole", f"{name} was {state}, nor refused, in {seconds:g} s")]
    if response.status is None:
        return [Finding("whole", f"{name} got no answer: the connection was {ended_as(response)}")]
    if response.status not in may:
        return [Finding("whole", f"{name} got {response.status}: {response.body[:200]!r}")]
    if response.status != 200:
        return []
    if not response.ended:
        return [Finding("whole", f"{name} broke off after {answer.pieces} pieces: {ended_as(response)}")]
    if answer.error is not None:
        return [Finding("whole", f"{name} ended with the error {answer.error}")]
    if not answer.done or answer.finish_reason is None or answer.finish_reason == "abort":
        reason = f"finish_reason {answer.finish_reason!r}, {'with' if answer.done else 'without'} [DONE]"
        return [Finding("whole", f"{name} ended after {answer.pieces} pieces with {reason}")]
    return []


def ended_as(response: Response) -> str:
    return "not closed" if response.end is None else response.end.value


def check_usage(client: int, answer: Answer, max_tokens: int) -> list[Finding]:
    """Judge the usage of a whole answer by the tokens that were asked for and received."""
    usage = answer.usage
    if usage is None or not answer.done or answer.error:
        return []
    tokens = int(usage.get("completion_tokens") or 0)
    name = f"client {client}: completion_tokens is {tokens}"
    if tokens > max_tokens:
        return [Finding("usage", f"{name}, more than max_tokens {max_tokens}")]
    if answer.finish_reason == "length" and tokens != max_tokens:
        return [Finding("usage", f"{name}, but the answer ended with 'length' at max_tokens {max_tokens}")]
    if int(usage.get("prompt_tokens") or 0) < 1:
        return [Finding("usage", f"client {client}: prompt_tokens is {usage.get('prompt_tokens')}")]
    return []


def check_counters(before: Snapshot, now: Snapshot) -> list[Finding]:
    """Judge that no counter has decreased."""
    return [
        Finding("counters", f"{name} was {value:g}, and fell to {now.counters[name]:g}")
        for name, value in before.counters.items()
        if name in now.counters and now.counters[name] < value
    ]


def check_process(first: tuple[int, int] | None, now: tuple[int, int] | None, memory_may: int) -> list[Finding]:
    """Judge a process by its figures after the first programs; `memory_may` is its permitted growth in bytes."""
    if first is None or now is None:
        return []
    if now[0] > first[0] * 1.5 + memory_may:
        return [Finding("process", f"resident memory was {first[0] >> 20} MiB, now it is {now[0] >> 20} MiB")]
    if now[1] > first[1] + FILES_SLACK:
        return [Finding("process", f"open files were {first[1]}, now they are {now[1]}")]
    return []


def check_state(name: str, status: int | None, value: Any, expected: bool) -> list[Finding]:
    """Judge the answer of `is_sleeping` or `is_paused`."""
    reported = value.get(name) if isinstance(value, dict) else value
    if status != 200 or not isinstance(reported, bool) or reported == expected:
        return []
    return [Finding("state", f"{name} is {reported}, after calls that make it {expected}")]


def check_cached(rule: str, answer: Answer) -> list[Finding]:
    """Judge the first answer after a call that clears the prefix cache."""
    if not answer.cached_tokens:
        return []
    return [Finding("cached", f"the first answer after {rule} has cached_tokens {answer.cached_tokens}")]
