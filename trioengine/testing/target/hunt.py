"""Searches for a finding: draws programs, runs them, replays and shrinks the ones that fail, within a time."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import trio

from trioengine.testing.target.driver import TrioDriver
from trioengine.testing.target.exchange import Event, Target
from trioengine.testing.target.machine import Run
from trioengine.testing.target.oracles import Finding
from trioengine.testing.target.program import ALWAYS, Step, draw, simpler, step_from

REPLAYS = 5
ENOUGH = 4  # of these that fail
TRIALS = 4  # of programs that shrinking has found, the smallest first
CONFIRMATIONS = 2  # failures in a row of a program that replaces a larger one
SHRINKING = 180.0  # seconds
LONGEST = 12  # steps of a program
WARM_UP = 10  # programs before the first figures of the process
FORMAT = 1


@dataclass
class Found:
    """A finding with its shrunk program, and how often that program fails."""

    finding: Finding
    steps: list[Step]
    tag: str
    seed: int
    failed: int = 1  # of `replays`
    replays: int = 1
    recovered: bool = True
    log: list[Event] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_json(self, target: Target) -> str:
        """Return the finding's file; keys of the server are not in it."""
        steps = [[step.rule, step.args] for step in self.steps]
        return json.dumps(
            {
                "format": FORMAT,
                "dialect": target.dialect.name,
                "model": target.model,
                "seed": self.seed,
                "tag": self.tag,
                "oracle": self.finding.oracle,
                "message": self.finding.message,
                "rate": [self.failed, self.replays],
                "steps": steps,
                "schedule": [asdict(event) for event in self.log],
                "evidence": self.evidence,
            },
            indent=1,
        )


@dataclass
class Outcome:
    """The count of the programs and steps, and the findings."""

    programs: int = 0
    steps: int = 0
    seconds: float = 0.0
    rules: dict[str, int] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)


class Hunt:
    """A search on one server; `fresh` starts the server again where that is possible."""

    def __init__(
        self,
        driver: TrioDriver,
        target: Target,
        seed: int = 0,
        progress: Callable[[Outcome], None] = lambda outcome: None,
        fresh: Callable[[], Awaitable[None]] | None = None,
        *,
        has_pid: bool = False,
        make_run: Callable[..., Run] = Run,
        faults: Sequence[str] = (),
        longest: int = LONGEST,
    ) -> None:
        self.target = target
        self.outcome = Outcome()
        self._driver = driver
        self._seed = seed
        self._longest = longest
        self._progress = progress
        self.fresh = fresh
        self._chooser = random.Random(seed)
        self._rules = [*self._available(has_pid), *faults]
        self._make_run = make_run
        self._runs = 0

    def _available(self, has_pid: bool) -> list[str]:
        dialect = self.target.dialect
        rules = [*ALWAYS, *dialect.calls]
        rules += ["reuse"] if dialect.id_field else []
        rules += ["native"] if dialect.native else []
        return rules + (["stop"] if has_pid else [])

    async def search(self, seconds: float | None = None, programs: int | None = None) -> Outcome:
        """Run programs for a time or a number, or until the server fails to recover from a finding."""
        begin = trio.current_time()
        while programs is None or self.outcome.programs < programs:
            if seconds is not None and trio.current_time() - begin >= seconds:
                break
            run, finding = await self.run(draw(self._chooser, self._rules, self._longest, self.target.most))
            self._count(run, trio.current_time() - begin)
            if finding is not None and not await self._keep(run, finding):
                break
        self.outcome.seconds = trio.current_time() - begin
        return self.outcome

    async def run(self, steps: list[Step], ignored: frozenset[str] | None = None) -> tuple[Run, Finding | None]:
        """Run one program; oracles that have found something are ignored."""
        self._runs += 1
        chooser = random.Random(f"{self._seed} {self._runs}")
        tag = "".join(chooser.choices("bcdfghjkmnpqrstvwxz", k=6))
        known = frozenset(each.finding.oracle for each in self.outcome.found)
        run = self._make_run(self.target, steps, tag, known if ignored is None else ignored)
        return run, await self._driver.run(run.perform())

    def _count(self, run: Run, seconds: float) -> None:
        outcome = self.outcome
        outcome.programs += 1
        outcome.steps += len(run.steps)
        outcome.seconds = seconds
        for step in run.steps:
            outcome.rules[step.rule] = outcome.rules.get(step.rule, 0) + 1
        self._rules = [rule for rule in self._rules if rule not in run.refused]
        if outcome.programs == WARM_UP:
            self.target.process = run.evidence.get("process")
        self._progress(outcome)

    async def _keep(self, run: Run, finding: Finding) -> bool:
        """Shrink and replay a finding; return whether the search can go on."""
        found = Found(finding, run.steps, run.tag, self._seed, log=run.log, evidence=run.evidence)
        found.evidence["clients"] = evidence_of(run)
        self.outcome.found.append(found)  # so that an interrupt while it is shrunk does not lose it
        self._progress(self.outcome)
        found.recovered = await self._recover()
        if found.recovered:
            smaller = [found.steps]
            await self._shrink(found, smaller)
            await self._settle_on(found, smaller)
        return found.recovered

    async def _recover(self) -> bool:
        """Start the server again, or check that it answers; growth that remains is the base of the next programs."""
        if self.fresh is not None:
            await self.fresh()
            return True
        run, finding = await self.run([], frozenset())
        if finding is not None and finding.oracle == "process":
            self.target.process = run.evidence["process"]
            return True
        return finding is None

    async def _fails_again(self, found: Found, steps: list[Step]) -> bool:
        """Whether a program fails twice in a row: one that seldom fails is not worth keeping."""
        before = replace(found)
        for _ in range(CONFIRMATIONS):
            if not found.recovered or not await self._fails(found, steps):
                vars(found).update(vars(before) | {"recovered": found.recovered})
                return False
        return True

    async def _fails(self, found: Found, steps: list[Step]) -> bool:
        run, finding = await self.run(steps, frozenset())
        same = [each for each in run.findings if each.oracle == found.finding.oracle]
        if finding is not None:
            found.recovered = await self._recover()
        if same:
            found.finding, found.steps, found.tag = same[0], steps, run.tag
            found.log, found.evidence = run.log, run.evidence | {"clients": evidence_of(run)}
        return bool(same)

    async def _shrink(self, found: Found, smaller: list[list[Step]]) -> None:
        """Take smaller programs as long as they fail by the same oracle, in bounded time; add each to the list."""
        with trio.move_on_after(SHRINKING):
            await self._leave_out(found, smaller)
            await self._simplify(found, smaller)
            await self._leave_out(found, smaller)

    async def _settle_on(self, found: Found, smaller: list[list[Step]]) -> None:
        """Replay the smallest program, and larger ones if it fails too seldom; keep the one that failed most often.

        A small program may fail by a race alone, which the larger one does not need.
        """
        began, tried = trio.current_time(), []
        for steps in smaller[: -1 - TRIALS : -1]:
            await self._replay(found, steps)
            tried.append(replace(found))
            if found.failed >= ENOUGH or not found.recovered:
                return
            if trio.current_time() - began > SHRINKING:
                break
        best = max(tried, key=lambda each: each.failed)
        vars(found).update(vars(best) | {"recovered": found.recovered})

    async def _leave_out(self, found: Found, smaller: list[list[Step]]) -> None:
        """Leave out parts of the program, large ones first."""
        size = len(found.steps) - 1
        while size > 0:
            at = 0
            while at < len(found.steps) and found.recovered:
                rest = found.steps[:at] + found.steps[at + size :]
                if not rest or not await self._fails_again(found, rest):
                    at += size
                else:
                    smaller.append(rest)
            size //= 2

    async def _simplify(self, found: Found, smaller: list[list[Step]]) -> None:
        """Take the simplest argument with which the program still fails."""
        for at, name in [(at, name) for at, step in enumerate(found.steps) for name in step.args]:
            for step in simpler(found.steps[at], name):
                simple = [*found.steps[:at], step, *found.steps[at + 1 :]]
                if not found.recovered:
                    return
                if await self._fails_again(found, simple):
                    smaller.append(simple)
                    break

    async def _replay(self, found: Found, steps: list[Step]) -> None:
        found.failed = found.replays = 0
        while found.recovered and found.replays < REPLAYS:
            found.replays += 1
            found.failed += await self._fails(found, steps)
        if found.replays == 0:
            found.failed = found.replays = 1


def evidence_of(run: Run) -> dict[str, Any]:
    """Return the part of each response that its client received."""
    return {
        str(number): {
            "status": client.response.status,
            "bytes": client.response.received,
            "ended": client.response.ended,
            "connection": None if client.response.end is None else client.response.end.value,
            "last": client.response.body[-400:].decode("utf-8", "replace"),
        }
        for number, client in run.clients.items()
    }


def program_of(text: str) -> tuple[str, list[Step], dict[str, Any]]:
    """Read a finding's file: the dialect's name, the steps, and everything. Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("steps"), list):
        raise ValueError("not a finding of trioengine fuzz --target")
    return str(value.get("dialect")), [step_from(each) for each in value["steps"]], value
