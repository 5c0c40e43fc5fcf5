"""Judges a server by the oracles at the end of a program, when all clients have left."""

from __future__ import annotations

from dataclasses import dataclass

from trioengine.testing.target.exchange import GOLDEN_PROMPT, GOLDEN_TOKENS, Exchange, Target
from trioengine.testing.target.oracles import (
    Finding,
    Snapshot,
    check_counters,
    check_golden,
    check_markers,
    check_process,
    check_usage,
    check_whole,
)
from trioengine.testing.target.wire import (
    Action,
    Answer,
    Figures,
    Now,
    Response,
    Wait,
    answer_of,
)

FIRST_LOOK, LAST_LOOK = 0.03, 0.5  # seconds between two looks at the gauges, which grow


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


class Judge(Exchange):
    """The findings of one program, and the waits that they need."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.findings: list[Finding] = []
        self.markers: dict[int, str] = {}
        self.before = Snapshot()
        self.answers = 0

    def judge_client(self, number: int, client: Client) -> None:
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

    def judge(self) -> Action[None]:
        """Judge the server when all clients have left."""
        target = self.target
        yield from self.note("probe", f"POST {self.route}", to_server=True)
        probe = yield from self.golden(GOLDEN_TOKENS if target.golden.in_crowd else 1)
        yield from self.note("probe", f"{probe.status}", to_server=False)
        yield from self._health()
        if probe.status != 200 or not probe.ended:
            state = f"{probe.status} {probe.body[:200]!r}" if probe.is_over else "silent"
            self.findings.append(Finding("probe", f"a completion was not answered in {target.deadline:g} s: {state}"))
            return
        yield from self._judge_rest()
        answer = answer_of(probe if target.golden.in_crowd else (yield from self.golden(GOLDEN_TOKENS)))
        self.findings += check_golden(answer, target.golden)
        self.findings += check_markers(-1, answer.text, self.markers)
        self._judge_prompt(answer)
        yield from self._judge_books()
        figures = yield Figures()
        self.evidence["process"] = figures
        self.findings += check_process(target.process, figures, target.dialect.memory_may)

    def golden(self, tokens: int) -> Action[Response]:
        """Ask the golden prompt; a server that refuses because it is busy is asked again."""
        deadline = (yield Now()) + self.target.deadline
        while True:
            left = max(0.1, deadline - (yield Now()))
            response = yield from self.complete(GOLDEN_PROMPT, tokens, left, golden=tokens == GOLDEN_TOKENS)
            if response.status not in (429, 503) or (yield Now()) >= deadline:
                return response
            yield Wait(0.1)

    def _judge_prompt(self, answer: Answer) -> None:
        expected, usage = self.target.golden.prompt_tokens, answer.usage or {}
        if expected is not None and usage.get("prompt_tokens", expected) != expected:
            message = f"prompt_tokens of the same prompt was {expected}, now it is {usage['prompt_tokens']}"
            self.findings.append(Finding("usage", message))

    def _judge_rest(self) -> Action[None]:
        """Wait until the gauges are at rest and all answers are counted."""
        patience = self.target.deadline - self.target.slack
        deadline = (yield Now()) + patience
        now, pause = (yield from self.snapshot()), FIRST_LOOK
        while True:
            yield Wait(pause)
            last, now = now, (yield from self.snapshot())
            unrest = now.complaints(self.before, self.target.dialect) + self._moving(last, now)
            uncounted = self._uncounted(now)
            if not (unrest or uncounted) or (yield Now()) > deadline:
                break
            pause = min(2 * pause, LAST_LOOK)
        self.evidence |= {"before": vars(self.before), "after": vars(now)}
        seconds = f"{patience:g} s after the last close"
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
