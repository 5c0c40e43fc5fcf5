"""Performs a program of steps on a server, without I/O.

At the end of each program the server is made to answer again, each request that was left alone is read to its end, all
connections are closed, and then the server must return to rest. Every wait has a bound.
"""

from __future__ import annotations

import json
import random
from typing import Any

from trioengine.testing.target.dialects import RESTORE, TRANSITIONS, Call, Power
from trioengine.testing.target.exchange import GOLDEN_PROMPT, GOLDEN_TOKENS, Target, prompt_of
from trioengine.testing.target.judge import Client, Judge
from trioengine.testing.target.oracles import (
    Finding,
    check_cached,
    check_state,
)
from trioengine.testing.target.program import Step
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
    Signal,
    Wait,
    answer_of,
    json_of,
)


class Run(Judge):
    """One program on one server; `perform` returns its first finding by rank, or None."""

    def __init__(self, target: Target, steps: list[Step], tag: str, ignored: frozenset[str] = frozenset()) -> None:
        super().__init__(target)
        self.steps = steps
        self.tag = tag  # makes the markers and ids of this run unique
        self.power = Power.AWAKE
        self.clients: dict[int, Client] = {}
        self.refused: set[str] = set()  # rules that the server does not have
        self._ignored = ignored
        self._replaces = False  # the server replaces its worker, and requests may fail
        self._opened = 0

    def perform(self) -> Action[Finding | None]:
        if any(step.rule in self.target.dialect.clears_cache for step in self.steps):
            yield from self.golden(GOLDEN_TOKENS)  # so that its tokens are in the prefix cache
        self.before = yield from self.snapshot()
        for step in self.steps:
            yield from self.note("program", str(step), to_server=True)
            yield from getattr(self, f"do_{step.rule}")(**step.args)
        yield from self._restore()
        yield from self._read_all()
        yield from self.judge()
        findings = [each for each in self.findings if each.oracle not in self._ignored]
        return min(findings, key=lambda each: each.rank) if findings else None

    # ---- clients ----------------------------------------------------------------------------------------------------

    def do_open(self, client: int, stream: bool, max_tokens: int, words: int, golden: bool) -> Action[None]:
        yield from self._leave(client, Close.FIN)
        id = f"fz{self.tag}{'x' * client}"  # the ids of larger numbers begin with it
        yield from self._open(client, id, stream, max_tokens, words, golden)

    def _open(self, client: int, id: str, stream: bool, max_tokens: int, words: int, golden: bool) -> Action[None]:
        marker = self._marker()
        prompt = GOLDEN_PROMPT if golden else prompt_of(marker, words)
        max_tokens = GOLDEN_TOKENS if golden else max_tokens
        response = Response()
        opened = Client(response, marker, id, max_tokens, golden, excused=self._may_fail)
        self.clients[client], self.markers[self._opened] = opened, marker
        body = self.body(prompt, max_tokens, stream=stream, id=id, golden=golden)
        yield from self.note(str(client), f"POST {self.route} ({'stream' if stream else 'whole'})", to_server=True)
        yield from self._connect(client, self.encode("POST", self.route, body), response)

    @property
    def _may_fail(self) -> bool:
        return self._replaces or self.power is not Power.AWAKE

    def _marker(self) -> str:
        self._opened += 1
        chooser = random.Random(f"{self.tag} {self._opened}")  # unlike its neighbours, which a model might invent
        return "".join(chooser.choices("bcdfghjkmnpqrstvwxz", k=10))

    def _connect(self, number: int, data: bytes, response: Response) -> Action[None]:
        if not (yield Connect(number)) or not (yield Send(number, data, self.target.deadline)):
            response.finish(End.RESET)

    def do_read(self, client: int, chunks: int) -> Action[None]:
        """Read so many chunks, but do not insist: the end of the program does."""
        if client in self.clients and self.power is Power.AWAKE and not self.clients[client].stalled:
            yield from self._read_some(client, chunks, self.target.patience)

    def _read_some(self, client: int, chunks: int, patience: float) -> Action[None]:
        response = self.clients[client].response
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
            yield from self._open(number, f"fz{self.tag}-burst-{number}", True, 64, words, False)
        deadline = (yield Now()) + self.target.patience
        for number in numbers:
            if chunks and self.power is Power.AWAKE:
                yield from self._read_some(number, chunks, deadline - (yield Now()))
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

    def do_bad(self, kind: str) -> Action[None]:
        good = json.loads(self.body("Hello", 1, stream=False))
        prompt = "messages" if "messages" in good else "prompt"
        changes: dict[str, dict[str, Any]] = {
            "wrong type": {"max_tokens": "many"},
            "out of range": {"temperature": -1.0},
            "no prompt": {prompt: None},
            "unknown model": {"model": "a-model-that-does-not-exist"},
        }
        bodies = {"not json": b'{"model": ', "empty": b""}
        body = bodies.get(kind) if kind in bodies else json.dumps(good | changes[kind]).encode()
        yield from self._refused(kind, self.route, body)

    def _refused(self, kind: str, path: str, body: bytes | None) -> Action[None]:
        yield from self.note("odd", f"POST {path}: {kind}", to_server=True)
        response = yield from self.fetch("POST", path, body, self.target.deadline)
        yield from self.note("odd", f"{response.status}", to_server=False)
        dialect = self.target.dialect
        may = (*dialect.bad_may, *dialect.unavailable_may) if self.power is not Power.AWAKE else dialect.bad_may
        may = (*may, 200) if kind in ("unknown model",) or kind.startswith("a body") else may
        if response.status is not None and response.status not in may and not self._replaces:
            self.findings.append(Finding("refusal", f"{kind}: {response.status}, {response.body[:200]!r}"))

    def do_native(self, how: str) -> Action[None]:
        """Begin a completion on the server's own route, and leave."""
        body = json.dumps({"prompt": "Hello", "n_predict": 64, "stream": True}).encode()
        yield Connect(90)
        yield Send(90, self.encode("POST", self.target.dialect.native, body), self.target.deadline)
        yield Receive(90, min(0.5, self.target.deadline))
        yield Leave(90, Close(how))

    # ---- operators --------------------------------------------------------------------------------------------------

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
        if not (yield Signal("STOP")):
            yield from self.note("operator", "SIGSTOP: the server's process is not known", to_server=True)
            return
        yield Wait(milliseconds / 1000)
        yield Signal("CONT")

    def do_kill_worker(self) -> Action[None]:
        """Kill a worker that serves: the server has to replace it. Requests may fail until it has."""
        if self.power is not Power.AWAKE:
            return
        yield from self._await_worker()
        killed = yield Signal("KILL", "worker")
        text = "SIGKILL of the worker" if killed else "SIGKILL: the worker's process is not known"
        yield from self.note("operator", text, to_server=True)
        if killed:
            self._replaces = True
            self._excuse_all()
            self.before.counters.clear()  # a counter may begin again with its process

    def _await_worker(self) -> Action[None]:
        """Wait until a completion is answered after the death of a worker, for as long as the probe may take."""
        seconds = self.target.deadline
        if self._replaces and not (yield from self.is_answered(seconds)):
            message = f"no completion was answered in {seconds:g} s after the death of the worker"
            self.findings.append(Finding("probe", message))
        self._replaces = False

    def _excuse_all(self) -> None:
        for client in self.clients.values():
            client.excused = True

    def _move(self, rule: str, variant: int = 0) -> Action[None]:
        """Make a call that changes the server's state, if the table has it."""
        if (self.power, rule) not in TRANSITIONS or rule not in self.target.dialect.calls:
            return
        yield from self._await_worker()
        quiet = False
        if rule not in ("resume", "wake"):
            self._excuse_all()
            quiet = not self.clients and not (yield from self.snapshot()).complaints(self.before, self.target.dialect)
        if (yield from self._call(rule, variant)):
            self.power = TRANSITIONS[self.power, rule]
            yield from self._check_state()
            if quiet and rule in self.target.dialect.clears_cache:
                yield from self._check_cached(rule)

    def _check_cached(self, rule: str) -> Action[None]:
        """Ask the golden prompt, which was asked before, as the first request after a clearing call."""
        response = yield from self.golden(GOLDEN_TOKENS)
        if response.status == 200:
            self.findings += check_cached(rule, answer_of(response))

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
        elif self._replaces:
            pass  # it may fail
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
            if path and (self.power, path) not in dialect.state_may:
                page = yield from self.fetch("GET", path, None, self.target.deadline)
                value = json_of(page.body.decode("utf-8", "replace"))
                self.findings += check_state(path.strip("/"), page.status, value, self.power is state)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _restore(self) -> Action[None]:
        yield from self._await_worker()
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
            self.judge_client(number, client)
