"""Requests, sessions and admissions of one engine, as they happen; compared with its ledger in the end."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.gate import Gate
from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.actors.waiting_line import WaitingLine, waits_for
from trioengine.core.errors import EngineAsleep, EngineClosed, EngineError, EngineOverloaded, TimedOut
from trioengine.core.lifecycle import Power
from trioengine.core.types import Cause, FinishReason

FOR_A_SESSION = ("sessions", "loading")  # codes
FOR_A_REQUEST = ("queue", "loading", "restarting", "draining")
FOR_AN_AUDIT = tuple(power.value for power in Power)  # where there is no worker


def check_overloaded(error: EngineOverloaded, gate: Gate, codes: tuple[str, ...]) -> None:
    """There is no slot, or no worker, of the kind that it names; its code is one of these."""
    config, ledger = gate._config, gate.ledger
    assert error.code in codes, f"refused for {error.code}, which is no reason here"
    match error.code:
        case "sessions":
            taken, slots = ledger.sessions, config.max_sessions
            assert taken == slots, f"{taken} of {slots} session slots are taken, and {error!r}"
        case "queue":
            taken, slots = ledger.in_flight, config.max_num_seqs + config.max_num_queued_reqs
            assert taken == slots, f"{taken} of {slots} slots are taken, and {error!r}"
        case code:
            is_true = code == gate.power.value and gate.power is not Power.AWAKE
            assert is_true, f"the engine is {gate.power.value}, and refuses for {code}"


def check_refused(
    error: EngineError, engine: Engine, codes: tuple[str, ...], *, wait: bool | None, deadline: float = math.inf
) -> None:
    """A call is refused: not for the lack that it waits out, and with TimedOut not before the deadline.

    A call with `wait=None` may be refused in the line and resume a pass later, in another state of the engine; its
    reason was checked when it was refused (Admissions).
    """
    if isinstance(error, TimedOut):
        assert trio.current_time() >= deadline, f"it has time until {deadline}, and got {error!r}"
    if isinstance(error, EngineOverloaded | EngineAsleep):
        if isinstance(error, EngineOverloaded) and error.code == "payloads":
            return  # judged where there was no room (PayloadWatch)
        assert not waits_for(error, wait), f"it was to wait, and got {error!r}"
        if wait is None and isinstance(error, EngineOverloaded):
            assert error.code in codes, f"refused for {error.code}, which is no reason here"
        elif isinstance(error, EngineOverloaded):
            check_overloaded(error, engine.gate, codes)
        elif wait is not None:
            assert not engine.gate.is_awake, f"the engine is awake, and {error!r}"


def check_not_admitted(error: EngineError, engine: Engine, *, wait: bool | None, deadline: float) -> None:
    """No session is opened for a caller."""
    check_refused(error, engine, FOR_A_SESSION, wait=wait, deadline=deadline)
    if isinstance(error, EngineClosed):
        power = engine.gate.power
        assert power in (Power.DRAINING, Power.CLOSED), f"the engine is {power.value}, and {error!r}"


class Accounts:
    """Those of one engine. `admitted` are the ids of the requests that got a slot, whoever notes them."""

    def __init__(self, admitted: AbstractSet[int]) -> None:
        self.generations: list[Generation] = []
        self._by_task: dict[trio.lowlevel.Task, Generation] = {}
        self._admitted = admitted
        self._rejected = 0

    def latest_of(self, task: trio.lowlevel.Task | None) -> Generation | None:
        """The last request that a task has made."""
        return None if task is None else self._by_task.get(task)

    def of_requests(self, init: Any) -> Any:
        """For `Generation.__init__`: all that there are, and whose they are."""

        def watched(generation: Generation, *args: Any, **more: Any) -> None:
            init(generation, *args, **more)
            self.generations.append(generation)
            self._by_task[trio.lowlevel.current_task()] = generation

        return watched

    def of_openings(self, aenter: Any) -> Any:
        """For `Session.__aenter__`: a session that is refused, ended or cancelled while it is entered is counted."""

        async def watched(session: Session) -> Any:
            try:
                return await aenter(session)
            except (EngineError, trio.Cancelled):
                self._rejected += 1
                raise

        return watched

    def of_starts(self, start: Any) -> Any:
        """For `Session.start`: so is a request that is refused; all others have an outcome."""

        async def watched(session: Session, generation: Generation) -> None:
            try:
                await start(session, generation)
            except EngineError:
                self._rejected += generation.outcome is None
                raise

        return watched

    def check(self, engine: Engine) -> None:
        """Everybody has left: every request, every cause and every refusal is in the books, once."""
        admitted = [generation for generation in self.generations if generation._request_id in self._admitted]
        undecided = [generation for generation in admitted if generation.outcome is None]
        assert not undecided, f"they had a slot, and have no outcome: {undecided}"
        outcomes = [generation.outcome for generation in self.generations if generation.outcome is not None]
        reasons = Counter(outcome.finish_reason for outcome in outcomes)
        causes = Counter(outcome.cause for outcome in outcomes if outcome.cause is not None)
        statistics = engine.statistics()
        for name, due, found in (
            ("received", len(outcomes), statistics.received),
            ("finish_reasons", {reason: reasons[reason] for reason in FinishReason}, statistics.finish_reasons),
            ("abort_causes", {cause: causes[cause] for cause in Cause}, statistics.abort_causes),
            ("rejected", self._rejected, statistics.rejected),
        ):
            assert found == due, f"the books say of {name} {found}, the callers were told {due}"

    @property
    def num_shut_down(self) -> int:
        """Requests that were aborted because the engine ends."""
        outcomes = (generation.outcome for generation in self.generations)
        return sum(outcome is not None and outcome.cause is Cause.SHUTDOWN for outcome in outcomes)


class Admissions:
    """Those of one engine."""

    def __init__(self, crashes: list[Exception]) -> None:
        self.requests: set[int] = set()  # that were admitted, by their ids
        self._crashes = crashes
        self._tickets = itertools.count()
        self._arrivals: dict[trio.lowlevel.Task, int] = {}
        self._is_serving = False

    def in_order(self, wait: Any) -> Any:
        """For `WaitingLine.wait`: nobody is served before one who came earlier and still waits."""

        async def watched(line: WaitingLine, admission: Callable[[], object], **options: bool | None) -> None:
            arrivals = self._arrivals
            own = arrivals[trio.lowlevel.current_task()] = next(self._tickets)

            def served() -> None:
                self._is_serving = True
                try:
                    admission()
                finally:
                    self._is_serving = False
                if any(arrivals[task] < own for task in line._waiters):
                    self._complain("somebody in a line was overtaken")

            await wait(line, served, **options)

        return watched

    def of_sessions(self, admit: Any) -> Any:
        """For `Gate.admit_session`."""

        def watched(gate: Gate) -> int:
            return self._watch(gate, admit, gate.sessions, FOR_A_SESSION)

        return watched

    def of_requests(self, admit: Any) -> Any:
        """For `Gate.admit_request`."""

        def watched(gate: Gate) -> int:
            request_id = self._watch(gate, admit, gate.requests, FOR_A_REQUEST)
            self.requests.add(request_id)
            return request_id

        return watched

    def _watch(self, gate: Gate, admit: Callable[[Gate], int], line: WaitingLine, codes: tuple[str, ...]) -> int:
        """Who is refused is told the truth; who is admitted without having waited does not overtake those who wait."""
        try:
            id = admit(gate)
        except EngineOverloaded as error:
            try:
                check_overloaded(error, gate, codes)
            except AssertionError as exc:
                self._crashes.append(exc)
            raise
        if len(line) and not self._is_serving:
            self._complain(f"a newcomer is admitted, and {len(line)} wait in the line")
        return id

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))
