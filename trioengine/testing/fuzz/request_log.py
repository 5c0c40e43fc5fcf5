"""Requests, sessions and admissions of one engine, as they happen; compared with its ledger in the end."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.observer import Observer, Slot
from trioengine.core.errors import EngineAsleep, EngineClosed, EngineError, EngineOverloaded, TimedOut
from trioengine.core.lifecycle import Attachment, Event, Phase, Power
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.testing.fuzz import inside

FOR_A_SESSION = ("sessions", "loading")  # codes
FOR_A_REQUEST = ("queue", "loading", "restarting", "draining")
FOR_AN_AUDIT = tuple(power.value for power in Power)  # without a worker


def check_overloaded(error: EngineOverloaded, engine: Engine, codes: tuple[str, ...], needed: int = 1) -> None:
    """The error is true, and its code one of these: fewer slots are free than needed, or the worker is missing."""
    config, power = engine.config, inside.power(engine)
    assert error.code in codes, f"refused for {error.code}, which is not a reason here"
    slots, taken = config.max_num_seqs + config.max_num_queued_reqs, inside.num_in_flight(engine)
    match error.code:
        case "sessions":
            slots, taken = config.max_sessions, inside.num_sessions(engine)
        case "queue":
            pass
        case code:
            is_true = code == power.value and power is not Power.AWAKE
            assert is_true, f"the engine is {power.value}, and refuses for {code}"
            return
    free = slots - taken - inside.num_claimed(engine)
    assert 0 <= free < needed, f"of {slots} slots {free} are free, {needed} are needed, and {error!r}"


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
        assert not inside.waits_for(error, wait), f"it was to wait, and got {error!r}"
        if wait is None and isinstance(error, EngineOverloaded):
            assert error.code in codes, f"refused for {error.code}, which is not a reason here"
        elif isinstance(error, EngineOverloaded):
            check_overloaded(error, engine, codes)
        elif wait is not None:
            assert not inside.is_admitting(engine), f"the engine is awake, and {error!r}"


def check_not_admitted(error: EngineError, engine: Engine, *, wait: bool | None, deadline: float) -> None:
    """No session is opened for a caller."""
    check_refused(error, engine, FOR_A_SESSION, wait=wait, deadline=deadline)
    if isinstance(error, EngineClosed):
        power = inside.power(engine)
        assert power in (Power.DRAINING, Power.CLOSED), f"the engine is {power.value}, and {error!r}"


class RequestLog(Observer):
    """All requests of one engine, and how many requests and sessions were refused.

    `admitted` has the ids of the requests that got a slot, as AdmissionLog collects them.
    """

    def __init__(self, admitted: AbstractSet[int]) -> None:
        self.generations: list[Generation] = []
        self._by_task: dict[trio.lowlevel.Task, Generation] = {}
        self._admitted = admitted
        self.num_claims_refused = 0  # each is one refusal
        self._num_entering = 0  # sessions, minus those that were opened
        self._refused: set[object] = set()  # requests without an outcome
        self._causes: dict[inside.Request, AbstractSet[Cause]] = {}  # of those that were aborted: the first ones
        self._prepared: set[inside.Request] = set()  # those that were posted to a worker

    def latest_of(self, task: trio.lowlevel.Task | None) -> Generation | None:
        """The last request that a task has made."""
        return None if task is None else self._by_task.get(task)

    def is_choice(self, session: inside.SessionActor) -> bool:
        """Whether its request is one of several choices."""
        return _request_of(session.label) is not None

    def check_choices(self, going: Sequence[inside.SessionActor]) -> None:
        """No task can run: no choice of a request goes on when another one, which has its label, has failed."""
        of_going = {_request_of(session.label) for session in going} - {None}
        for generation in self.generations if of_going else ():
            label = inside.session_of(generation).label
            outcome = generation.outcome
            has_failed = inside.record(generation) in self._refused if outcome is None else not outcome.is_complete
            assert not has_failed or _request_of(label) not in of_going, (
                f"{label} has failed, and others go on: {going}"
            )

    # ---- the first cause of an abort, which counts ------------------------------------------------------------------

    def fix_cause(self, requests: Iterable[Generation | inside.Request], cause: Cause) -> None:
        """In this step these are aborted: those that were not aborted before, for this cause alone."""
        for request in requests:
            if inside.is_undecided(request):
                self._causes.setdefault(inside.record(request), {cause})

    def lacks_causes(self, generation: Generation) -> bool:
        """Whether the request is aborted, and its causes are not fixed."""
        request = inside.record(generation)
        return request not in self._causes and inside.is_aborted(request)

    def fix_causes(self, generation: Generation, causes: AbstractSet[Cause]) -> None:
        """No task can run, and the request lacks its causes: they are among those that there are until now."""
        self._causes[inside.record(generation)] = causes

    def is_fixed(self, generation: Generation) -> bool:
        """Whether the request was aborted."""
        return inside.record(generation) in self._causes

    def causes_of(self, generation: Generation | None, otherwise: AbstractSet[Cause]) -> AbstractSet[Cause]:
        """The causes of which one has ended a request, if it was aborted."""
        return otherwise if generation is None else self._causes.get(inside.record(generation), otherwise)

    def had_slot(self, generation: Generation) -> bool:
        """Whether the request was admitted."""
        return inside.has_id(generation) and generation.request_id in self._admitted

    def was_prepared(self, generation: Generation) -> bool:
        """Whether its preparation was over, so that it was posted to a worker."""
        return inside.record(generation) in self._prepared

    @property
    def whole_answers(self) -> list[Completion]:
        """The answers of requests that ran to their end."""
        complete = (each for each in self.generations if each.outcome is not None and each.outcome.is_complete)
        return [generation.completion for generation in complete]

    @property
    def undecided(self) -> list[Generation]:
        """The requests without an outcome that were not refused, where each is entered in the step that makes it."""
        without = (each for each in self.generations if each.outcome is None)
        return [generation for generation in without if inside.record(generation) not in self._refused]

    @property
    def num_begun(self) -> int:
        """Requests that got a token."""
        return sum(inside.num_tokens(generation) > 0 for generation in self.generations)

    def request_created(self, generation: object) -> None:
        assert isinstance(generation, Generation), "an engine's requests are Generations"
        self.generations.append(generation)
        self._by_task[trio.lowlevel.current_task()] = generation

    def request_refused(self, request: object, error: Exception) -> None:
        assert isinstance(request, inside.Request), "requests are refused by their records"
        if request.outcome is None:
            self._refused.add(request)

    def session_moved(self, actor: object, phase: Phase, attachment: Attachment, event: Event) -> None:
        if event is Event.COMMIT:
            assert isinstance(actor, inside.SessionActor), "sessions move as actors"
            request = inside.request_of(actor)
            assert request is not None, "a request is prepared"
            self._prepared.add(request)

    def session_entering(self, session: object) -> None:
        self._num_entering += 1

    def session_opened(self, session: object) -> None:
        self._num_entering -= 1

    def check(self, engine: Engine) -> None:
        """All callers have left: every request, every cause and every refusal is counted once in the ledger."""
        admitted = filter(self.had_slot, self.generations)
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
            ("rejected", self._num_entering + len(self._refused) + self.num_claims_refused, statistics.rejected),
        ):
            assert found == due, f"the books count {found} {name}, the callers got {due}"

    @property
    def num_shut_down(self) -> int:
        """Requests that were aborted because the engine ends."""
        outcomes = (generation.outcome for generation in self.generations)
        return sum(outcome is not None and outcome.cause is Cause.SHUTDOWN for outcome in outcomes)


def _request_of(label: str | None) -> str | None:
    """The part of a label that all choices of a request have; None without several choices."""
    found = None if label is None else re.fullmatch(r"(\w+-\w+)-\d+", label)
    return None if found is None else found[1]


class AdmissionLog(Observer):
    """Checks each admission and each refusal of one engine as it happens; complaints are added to `crashes`."""

    def __init__(self, engine: Engine, crashes: list[Exception]) -> None:
        self.requests: set[int] = set()  # ids of those that were admitted
        self._engine = engine
        self._crashes = crashes
        self._tickets = itertools.count()
        self._arrivals: dict[trio.lowlevel.Task, int] = {}
        self._is_serving = False
        self.needed = 1  # slots that are to be taken at once
        self.claimants: set[trio.lowlevel.Task] = set()  # that take slots which were claimed before

    def line_joined(self, line: object) -> None:
        self._arrivals[trio.lowlevel.current_task()] = next(self._tickets)

    def line_serving(self, line: object, task: trio.lowlevel.Task) -> None:
        self._is_serving = True

    def line_served(self, line: object, task: trio.lowlevel.Task, *, is_admitted: bool) -> None:
        """Complain if a task is served before one that came earlier and still waits."""
        self._is_serving = False
        own = self._arrivals[task]
        if is_admitted and any(self._arrivals[other] < own for other in inside.waiting_in(line)):
            self._complain("a caller in a line was overtaken")

    def slot_taken(self, slot: Slot, id: int) -> None:
        """Complain if a newcomer overtakes those in line."""
        if slot is Slot.REQUEST:
            self.requests.add(id)
        waiting = inside.num_in_line_for_slot(self._engine, is_session=slot is Slot.SESSION)
        if waiting and not self._is_serving and trio.lowlevel.current_task() not in self.claimants:
            self._complain(f"a newcomer is admitted, and {waiting} wait in the line")

    def slot_refused(self, slot: Slot, error: Exception) -> None:
        """Complain unless the reason is true."""
        if isinstance(error, EngineOverloaded):
            try:
                codes = FOR_A_SESSION if slot is Slot.SESSION else FOR_A_REQUEST
                check_overloaded(error, self._engine, codes, self.needed)
            except AssertionError as exc:
                self._crashes.append(exc)

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))
