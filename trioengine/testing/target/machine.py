"""Performs a program of steps on a server, and judges the server by the oracles; without I/O.

At the end of each program the server is made to answer again, each request that was left alone is read to its end, all
connections are closed, and then the server must return to rest. Every wait has a bound.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trioengine.testing.target.dialects import RESTORE, TRANSITIONS, Call, Dialect, Power
from trioengine.testing.target.oracles import (
    Finding,
    Golden,
    Snapshot,
    check_counters,
    check_golden,
    check_markers,
    check_process,
    check_state,
    check_usage,
    check_whole,
)
from trioengine.testing.target.program import Step
from trioengine.testing.target.wire import (
    Action,
    Answer,
    Close,
    Connect,
    End,
    Figures,
    Leave,
    Now,
    Receive,
    Response,
    Send,
    Signal,
    Wait,
    answer_of,
    count_in,
    json_of,
    metrics_of,
    request_bytes,
)

GOLDEN_PROMPT = "Count from one to nine in words."
GOLDEN_TOKENS = 12
_SYLLABLES = "qaz wux vyk zof xeb juq kiv pyx".split()


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
    golden: Golden = field(default_factory=Golden)
    process: tuple[int, int] | None = None  # figures after the first programs
    headers: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass
class Client:
    """A request of the program."""

    response: Response
    marker: str
    id: str
    max_tokens: int
    golden: bool
    excused: bool = False  # it need not be answered whole
    stalled: bool = False


@dataclass(frozen=True)
class Event:
    """A line of the schedule: `client` is a number, or the name of a lifeline."""

    at: float
    client: str
    to_server: bool
    text: str


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


class Run(Exchange):
    """One program on one server; `perform` returns its first finding by rank, or None."""

    def __init__(self, target: Target, steps: list[Step], tag: str, ignored: frozenset[str] = frozenset()) -> None:
        super().__init__(target)
        self.steps = steps
        self.tag = tag  # makes the markers and ids of this run unique
        self.power = Power.AWAKE
        self.clients: dict[int, Client] = {}
        self.markers: dict[int, str] = {}
        self.findings: list[Finding] = []
        self.refused: set[str] = set()  # rules that the server does not have
        self.answers = 0
        self._ignored = ignored
        self._opened = 0
        self._cleared: str | None = None  # the call after which no cached token may be left

    def perform(self) -> Action[Finding | None]:
        self.before = yield from self.snapshot()
        for step in self.steps:
            yield from self.note("program", str(step), to_server=True)
            yield from getattr(self, f"do_{step.rule}")(**step.args)
        yield from self._restore()
        yield from self._read_all()
        yield from self._judge()
        findings = [each for each in self.findings if each.oracle not in self._ignored]
        return min(findings, key=lambda each: each.rank) if findings else None

    # ---- clients ------------------------------------------------------------------------------------------------------

    def do_open(self, client: int, stream: bool, max_tokens: int, words: int, golden: bool) -> Action[None]:
        yield from self._leave(client, Close.FIN)
        yield from self._open(client, f"fz{self.tag}-{client}", stream, max_tokens, words, golden)

    def _open(self, client: int, id: str, stream: bool, max_tokens: int, words: int, golden: bool) -> Action[None]:
        marker = self._marker()
        prompt = GOLDEN_PROMPT if golden else f"{marker}. {'Some words come first. ' * (words // 4)}Repeat: {marker}"
        max_tokens = GOLDEN_TOKENS if golden else max_tokens
        response = Response()
        opened = Client(response, marker, id, max_tokens, golden, excused=self.power is not Power.AWAKE)
        self.clients[client], self.markers[self._opened] = opened, marker
        body = self.body(prompt, max_tokens, stream=stream, id=id, golden=golden)
        yield from self.note(str(client), f"POST {self.route} ({'stream' if stream else 'whole'})", to_server=True)
        yield from self._connect(client, self.encode("POST", self.route, body), response)

    def _marker(self) -> str:
        self._opened += 1
        digits = (self._opened // 64 % 8, self._opened // 8 % 8, self._opened % 8)
        return self.tag + "".join(_SYLLABLES[digit] for digit in digits)

    def _connect(self, number: int, data: bytes, response: Response) -> Action[None]:
        if not (yield Connect(number)) or not (yield Send(number, data, self.target.deadline)):
            response.finish(End.RESET)

    def do_read(self, client: int, chunks: int) -> Action[None]:
        """Read so many chunks, but do not insist: the end of the program does."""
        if client in self.clients and self.power is Power.AWAKE and not self.clients[client].stalled:
            response = self.clients[client].response
            patience = min(2.0, self.target.deadline)
            yield from self.read(client, response, patience, len(response.events) + chunks)
            yield from self._received(client)

    def _received(self, client: int) -> Action[None]:
        response, answer = self.clients[client].response, answer_of(self.clients[client].response)
        status = "nothing yet" if response.status is None else f"{response.status}, {response.received} bytes"
        end = f", {answer.finish_reason}" if answer.finish_reason else ""
        yield from self.note(str(client), f"{status}{end}", to_server=False)

    def do_stall(self, client: int) -> Action[None]:
        if client in self.clients:
            self.clients[client].stalled = True
            yield from self.note(str(client), "stops reading", to_server=True)

    def do_close(self, client: int, how: str) -> Action[None]:
        yield from self._leave(client, Close(how))

    def _leave(self, client: int, how: Close) -> Action[None]:
        if client not in self.clients:
            return
        left = self.clients[client]
        yield Leave(client, how)
        if how is Close.HALF:
            left.excused = True
        else:
            del self.clients[client]
        yield from self.note(str(client), f"closes ({how.value})", to_server=True)

    def do_burst(self, count: int, chunks: int, how: str, words: int) -> Action[None]:
        """Open requests at once, and leave them together."""
        numbers = range(100, 100 + count)
        for number in numbers:
            yield from self._open(number, f"fz{self.tag}-{number}", True, 64, words, False)
        for number in numbers:
            if chunks and self.power is Power.AWAKE:
                yield from self.do_read(number, chunks)
        for number in numbers:
            yield from self._leave(number, Close(how))

    def do_reuse(self, client: int, of: int) -> Action[None]:
        """Open a request with the id of another one, which may be refused for it."""
        if of not in self.clients or of == client:
            return
        yield from self._leave(client, Close.FIN)
        yield from self._open(client, self.clients[of].id, True, 8, 0, False)
        self.clients[client].excused = True

    def do_wait(self, milliseconds: int) -> Action[None]:
        yield Wait(milliseconds / 1000)

    def do_oversize(self, kilobytes: int) -> Action[None]:
        body = self.body("x " * (kilobytes * 512), 1, stream=False)
        yield from self._refused(f"a body of {kilobytes} KB", self.route, body)

    def do_bad(self, what: str) -> Action[None]:
        good = json.loads(self.body("Hello", 1, stream=False))
        prompt = "messages" if "messages" in good else "prompt"
        changes: dict[str, dict[str, Any]] = {
            "wrong type": {"max_tokens": "many"},
            "out of range": {"temperature": -1.0},
            "no prompt": {prompt: None},
            "unknown model": {"model": "a-model-that-does-not-exist"},
        }
        bodies = {"not json": b'{"model": ', "empty": b""}
        body = bodies.get(what) if what in bodies else json.dumps(good | changes[what]).encode()
        yield from self._refused(what, self.route, body)

    def _refused(self, what: str, path: str, body: bytes | None) -> Action[None]:
        yield from self.note("odd", f"POST {path}: {what}", to_server=True)
        response = yield from self.fetch("POST", path, body, self.target.deadline)
        yield from self.note("odd", f"{response.status}", to_server=False)
        dialect = self.target.dialect
        may = (*dialect.bad_may, *dialect.unavailable_may) if self.power is not Power.AWAKE else dialect.bad_may
        may = (*may, 200) if what in ("unknown model",) or what.startswith("a body") else may
        if response.status is not None and response.status not in may:
            self.findings.append(Finding("refusal", f"{what}: {response.status}, {response.body[:200]!r}"))

    def do_native(self, how: str) -> Action[None]:
        """Begin a completion on the server's own route, and leave."""
        body = json.dumps({"prompt": "Hello", "n_predict": 64, "stream": True}).encode()
        yield Connect(90)
        yield Send(90, self.encode("POST", self.target.dialect.native, body), self.target.deadline)
        yield Receive(90, min(0.5, self.target.deadline))
        yield Leave(90, Close(how))

    # ---- operators ----------------------------------------------------------------------------------------------------

    def do_abort(self, client: int) -> Action[None]:
        if client not in self.clients:
            return
        for other in self.clients.values():
            other.excused = other.excused or other.id == self.clients[client].id
        yield from self._call("abort", id=self.clients[client].id)

    def do_abort_all(self) -> Action[None]:
        self._excuse_all()
        yield from self._call("abort_all")

    def do_pause(self, variant: int) -> Action[None]:
        yield from self._move("pause", variant)

    def do_resume(self, variant: int) -> Action[None]:
        yield from self._move("resume", variant)

    def do_sleep(self, variant: int) -> Action[None]:
        yield from self._move("sleep", variant)

    def do_wake(self, variant: int) -> Action[None]:
        yield from self._move("wake", variant)

    def do_update(self, variant: int) -> Action[None]:
        yield from self._move("update", variant)

    def do_reset(self, variant: int) -> Action[None]:
        yield from self._move("reset", variant)

    def do_stop(self, milliseconds: int) -> Action[None]:
        """Stop the server's process for a while."""
        if (yield Signal("STOP")):
            yield Wait(milliseconds / 1000)
            yield Signal("CONT")

    def _excuse_all(self) -> None:
        for client in self.clients.values():
            client.excused = True

    def _move(self, rule: str, variant: int = 0) -> Action[None]:
        """Make a call that changes the server's state, if the table has it."""
        if (self.power, rule) not in TRANSITIONS or rule not in self.target.dialect.calls:
            return
        if rule not in ("resume", "wake"):
            self._excuse_all()
        if (yield from self._call(rule, variant)):
            self.power = TRANSITIONS[self.power, rule]
            if rule in self.target.dialect.clears_cache:
                self._cleared = rule
            yield from self._check_state()

    def _call(self, rule: str, variant: int = 0, id: str = "") -> Action[bool]:
        calls = self.target.dialect.calls.get(rule)
        if not calls:
            return False
        call = calls[variant % len(calls)]
        yield from self.note("operator", f"{call.method} {call.path}", to_server=True)
        response = yield from self.fetch(call.method, call.path, self._filled(call, id), self.target.call_deadline)
        yield from self.note("operator", f"{response.status}", to_server=False)
        if not response.is_over:
            self.findings.append(Finding("call", f"{call.path} was not answered in {self.target.call_deadline:g} s"))
        elif response.status is None:
            self.findings.append(Finding("call", f"{call.path} got no answer: the connection was closed"))
        elif response.status in (400, 401, 403, 404, 405, 501):
            self.refused.add(rule)
        return response.status is not None and response.status < 300

    def _filled(self, call: Call, id: str) -> bytes | None:
        body = call.body
        return None if body is None else body.replace("{id}", id).replace("{model}", self.target.model).encode()

    def _check_state(self) -> Action[None]:
        dialect = self.target.dialect
        for path, state in ((dialect.is_sleeping, Power.ASLEEP), (dialect.is_paused, Power.PAUSED)):
            if path:
                page = yield from self.fetch("GET", path, None, self.target.deadline)
                value = json_of(page.body.decode("utf-8", "replace"))
                self.findings += check_state(path.strip("/"), page.status, value, self.power is state)

    # ---- the end ------------------------------------------------------------------------------------------------------

    def _restore(self) -> Action[None]:
        while self.power in RESTORE:
            power = self.power
            yield from self._move(RESTORE[power])
            if self.power is power:
                self.findings.append(Finding("call", f"{RESTORE[power]} does not end the state {power.value}"))
                return

    def _read_all(self) -> Action[None]:
        """Read each request that is left, and leave."""
        for number, client in self.clients.items():
            if client.stalled:
                yield Leave(number, Close.RST)
                continue
            yield from self.read(number, client.response, self.target.deadline)
            yield from self._received(number)
            yield Leave(number, Close.FIN)
            self._judge_client(number, client)

    def _judge_client(self, number: int, client: Client) -> None:
        answer, response, target = answer_of(client.response), client.response, self.target
        findings = check_whole(number, response, answer, target.dialect.awake_may, target.deadline)
        if not client.excused or (not response.is_over and response.end is None):
            self.findings += findings
        own = next((at for at, marker in self.markers.items() if marker == client.marker), -1)
        self.findings += check_markers(own, answer.text, self.markers)
        if findings or client.excused or response.status != 200:
            return
        self.answers += 1
        self.findings += check_usage(number, answer, client.max_tokens)
        if client.golden and target.golden.in_crowd:
            self.findings += check_golden(answer, target.golden)

    def _judge(self) -> Action[None]:
        """Judge the server when all clients have left."""
        target = self.target
        yield from self.note("probe", f"POST {self.route}", to_server=True)
        probe = yield from self._golden(1)
        yield from self.note("probe", f"{probe.status}", to_server=False)
        yield from self._health()
        if probe.status != 200 or not probe.ended:
            state = f"{probe.status} {probe.body[:200]!r}" if probe.is_over else "silent"
            self.findings.append(Finding("probe", f"a completion was not answered in {target.deadline:g} s: {state}"))
            return
        yield from self._judge_rest()
        answer = answer_of((yield from self._golden(GOLDEN_TOKENS)))
        self.findings += check_golden(answer, target.golden)
        self.findings += check_markers(-1, answer.text, self.markers)
        self._judge_prompt(answer)
        yield from self._judge_books()
        figures = yield Figures()
        self.evidence["process"] = figures
        self.findings += check_process(target.process, figures)

    def _golden(self, tokens: int) -> Action[Response]:
        """Ask the golden prompt; a server that refuses because it is busy is asked again."""
        deadline = (yield Now()) + self.target.deadline
        while True:
            left = max(0.1, deadline - (yield Now()))
            response = yield from self.complete(GOLDEN_PROMPT, tokens, left, golden=tokens == GOLDEN_TOKENS)
            if self._cleared is not None and response.status == 200:
                self._judge_cached(answer_of(response))
            if response.status not in (429, 503) or (yield Now()) >= deadline:
                return response
            yield Wait(0.1)

    def _judge_cached(self, answer: Answer) -> None:
        if answer.cached_tokens:
            message = f"the first answer after {self._cleared} has cached_tokens {answer.cached_tokens}"
            self.findings.append(Finding("cached", message))
        self._cleared = None

    def _judge_prompt(self, answer: Answer) -> None:
        expected, usage = self.target.golden.prompt_tokens, answer.usage or {}
        if expected is not None and usage.get("prompt_tokens", expected) != expected:
            message = f"prompt_tokens of the same prompt was {expected}, now it is {usage['prompt_tokens']}"
            self.findings.append(Finding("usage", message))

    def _judge_rest(self) -> Action[None]:
        """Wait until the gauges are at rest and all answers are counted."""
        deadline = (yield Now()) + self.target.deadline
        last = yield from self.snapshot()
        while True:
            now = yield from self.snapshot()
            unrest = now.complaints(self.before, self.target.dialect) + self._moving(last, now)
            uncounted = self._uncounted(now)
            if not (unrest or uncounted) or (yield Now()) > deadline:
                break
            last = now
            yield Wait(0.05)
        self.evidence |= {"before": vars(self.before), "after": vars(now)}
        seconds = f"{self.target.deadline:g} s after the last close"
        self.findings += [Finding("rest", f"{each}, {seconds}") for each in unrest]
        self.findings += [Finding("counters", each) for each in uncounted] + check_counters(self.before, now)

    def _moving(self, last: Snapshot, now: Snapshot) -> list[str]:
        name = self.target.dialect.still
        before, after = last.counters.get(name, 0.0), now.counters.get(name, 0.0)
        return [f"{name} still rises, from {before:g} to {after:g}"] if after > before else []

    def _uncounted(self, now: Snapshot) -> list[str]:
        name = self.target.dialect.finished
        if name not in now.counters or name not in self.before.counters:
            return []
        rise = now.counters[name] - self.before.counters[name]
        return [f"{name} rose by {rise:g} in {self.answers} answers"] if 0 <= rise < self.answers else []

    def _judge_books(self) -> Action[None]:
        if self.target.dialect.invariants:
            page = yield from self.fetch("GET", self.target.dialect.invariants, None, self.target.deadline)
            if page.status == 500:
                self.findings.append(Finding("counters", f"the server's own check: {page.body[:300]!r}"))

    def _health(self) -> Action[None]:
        if self.target.dialect.health:
            page = yield from self.fetch("GET", self.target.dialect.health, None, self.target.deadline)
            self.evidence["health"] = page.status
