"""Requests to one server, without I/O: the operations of a request and its response, and the log of a program."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trioengine.testing.target.dialects import Dialect
from trioengine.testing.target.oracles import (
    Golden,
    Snapshot,
)
from trioengine.testing.target.wire import (
    Action,
    Close,
    Connect,
    End,
    Leave,
    Now,
    Receive,
    Response,
    Send,
    Wait,
    count_in,
    json_of,
    metrics_of,
    request_bytes,
)

GOLDEN_PROMPT = "Count from one to nine in words."
GOLDEN_TOKENS = 12
STARTS = 3  # of a worker that each deadline has room for: it may have to be started again, and again


@dataclass
class Target:
    """The server as calibrated before the search."""

    host: str  # with its port, as in the header
    path: str  # before each route
    dialect: Dialect
    model: str = ""
    kind: str = "chat"  # or completions
    deadline: float = 20.0  # seconds for the probe, the rest, and a request that is left alone
    call_deadline: float = 60.0  # seconds for an operator's call
    patience: float = 2.0  # seconds for a few chunks, which a request that waits for others does not get
    most: dict[str, int] = field(default_factory=dict)  # arguments of the steps, by name, that a slow server permits
    slack: float = 0.0  # seconds of `deadline` in which a worker may start, which the return to rest does not need
    golden: Golden = field(default_factory=Golden)
    load_by: float | None = None  # moment until which it may load its model: set by the first request
    process: tuple[int, int] | None = None  # figures after the first programs
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    def allow_starts(self, seconds: float, hang: float = 0.0) -> None:
        """Give each deadline room for starts of a worker, of which one takes `seconds`, and for `hang` seconds."""
        self.slack = STARTS * seconds + hang
        self.deadline += self.slack
        self.call_deadline += self.slack


@dataclass(frozen=True)
class Event:
    """A line of the schedule: `client` is a number, or the name of a lifeline."""

    at: float
    client: str
    to_server: bool
    text: str


def prompt_of(marker: str, words: int) -> str:
    """Return a prompt of so many words and some more, which asks for the marker."""
    return f"{marker}. {'Some words come first. ' * (words // 4)}Repeat: {marker}"


class Exchange:
    """Requests to one target, one at a time, with a log."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.log: list[Event] = []
        self.evidence: dict[str, Any] = {}
        self._number = 1000
        self._started: float | None = None

    def note(self, client: str, text: str, *, to_server: bool) -> Action[None]:
        now = yield Now()
        self._started = now if self._started is None else self._started
        self.log.append(Event(round(now - self._started, 3), client, to_server, text))

    def encode(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> bytes:
        target = self.target
        return request_bytes(target.host, method, target.path + path, body, {**target.headers, **(headers or {})})

    def fetch(self, method: str, path: str, body: bytes | None, timeout: float) -> Action[Response]:
        """Send a request on a connection of its own and read its response, until `timeout` at most."""
        self._number += 1
        number, response = self._number, Response()
        if not (yield Connect(number)):
            response.finish(End.RESET)
            return response
        yield Send(number, self.encode(method, path, body), timeout)
        yield from self.read(number, response, timeout)
        yield Leave(number, Close.FIN)
        return response

    def read(self, number: int, response: Response, timeout: float, events: int | None = None) -> Action[None]:
        """Read a response to its end, or until it has so many events."""
        deadline = (yield Now()) + timeout
        while not response.is_over and (events is None or len(response.events) < events):
            left = deadline - (yield Now())
            got = (yield Receive(number, left)) if left > 0 else End.TIMEOUT
            if got is End.TIMEOUT:
                return
            if isinstance(got, End):
                response.finish(got)
            else:
                response.feed(got)

    def body(self, prompt: str, max_tokens: int, *, stream: bool, id: str = "", golden: bool = False) -> bytes:
        target = self.target
        fields: dict[str, Any] = {"model": target.model, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        if target.kind == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if stream:
            fields["stream_options"] = {"include_usage": True}
        if id and target.dialect.id_field:
            fields[target.dialect.id_field] = id
        if golden and target.golden.logprobs:
            fields["logprobs"] = True
        return json.dumps(fields | target.dialect.extra).encode()

    @property
    def route(self) -> str:
        dialect = self.target.dialect
        return dialect.chat if self.target.kind == "chat" else dialect.completions

    def complete(self, prompt: str, max_tokens: int, timeout: float, *, golden: bool = False) -> Action[Response]:
        body = self.body(prompt, max_tokens, stream=False, golden=golden)
        return (yield from self.fetch("POST", self.route, body, timeout))

    def is_answered(self, timeout: float) -> Action[bool]:
        """Ask until a completion is answered, for `timeout` seconds at most."""
        deadline = (yield Now()) + timeout
        while (left := deadline - (yield Now())) > 0:
            response = yield from self.complete(GOLDEN_PROMPT, 1, left)
            if response.status == 200 and response.ended:
                return True
            yield Wait(min(0.1, left))
        return False

    def snapshot(self) -> Action[Snapshot]:
        """Read the gauges and counters that the server has."""
        dialect, found = self.target.dialect, Snapshot()
        if dialect.metrics:
            page = yield from self.fetch("GET", dialect.metrics, None, self.target.deadline)
            samples = metrics_of(page.body.decode("utf-8", "replace")) if page.status == 200 else {}
            names = [gauge.name for gauge in dialect.gauges]
            found.gauges = {name: samples[name] for name in names if name in samples}
            found.counters = {name: samples[name] for name in dialect.counters if name in samples}
        for count in dialect.counts:
            page = yield from self.fetch("GET", count.path, None, self.target.deadline)
            if page.status == 200:
                value = json_of(page.body.decode("utf-8", "replace"))
                found.gauges[f"{count.path} {count.key}"] = count_in(value, count.key)
        return found
