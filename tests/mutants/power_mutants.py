"""Mutants of sleep, wake, and of other weights."""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from mutant import Mutant, replaced, together

from trioengine.actors import power, session
from trioengine.actors.engine import Engine
from trioengine.actors.gate import Gate
from trioengine.actors.power import PowerActor
from trioengine.actors.power_change import InFlightPolicy, Mode, PowerChange, PowerState, StateSubscription
from trioengine.actors.request import Request
from trioengine.actors.runtime import Runtime
from trioengine.actors.session_actor import SessionActor
from trioengine.core.errors import Outcome, RequestRejected
from trioengine.core.lifecycle import Power, PowerEvent
from trioengine.core.power import ALL_TAGS, SleepState, Tag
from trioengine.core.types import Cause, FinishReason
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.scheduler import Scheduler


async def _do_not_wait(self: PowerActor, policy: InFlightPolicy, change: PowerChange) -> None:
    if not self.memory.asleep:
        self._gate.change_power(PowerEvent.QUIESCE)
    if policy.mode is not Mode.KEEP:
        self._sessions.abort_all(Cause.SLEEP)
    self._sessions.detach_all()


def _admit_what_waits_for_its_turn(_: Any) -> Any:
    return property(lambda self: self.power is Power.AWAKE)


def _open_after_any_tag(take_back: Any) -> Any:
    async def mutant(self: PowerActor, tags: frozenset[Tag]) -> None:
        memory = self.memory
        self.memory = memory.woken(ALL_TAGS - tags)  # nothing else sleeps
        try:
            await take_back(self, tags)
        except BaseException:
            self.memory = memory
            raise
        self.memory = memory.woken(tags)

    return mutant


def _believe_any_wake(check: Any) -> Any:
    def mutant(self: PowerActor, answer: Any) -> None:
        """Whatever it says, the memory is there."""

    return mutant


def _wake_what_is_awake(to_wake: Any) -> Any:
    def mutant(self: SleepState, tags: frozenset[Tag], *, reload: bool) -> frozenset[Tag]:
        sleeping: frozenset[Tag] = to_wake(self, tags, reload=reload)
        return sleeping | (tags - self.asleep)

    return mutant


def _keep_what_was_computed(forget_all: Any) -> Any:
    def mutant(self: Scheduler) -> None:
        """The prefix cache is as it was."""

    return mutant


def _keep_the_slots(sleep: Any) -> Any:
    def mutant(self: ToyRunner) -> None:
        slots, roots = dict(self._slots), dict(self._roots)
        sleep(self)
        self._slots.update(slots)
        self._roots.update(roots)

    return mutant


_CLOSED_BY_CALLERS: WeakKeyDictionary[Gate, int] = WeakKeyDictionary()


def _also_for_callers(pending: Any) -> Any:
    return property(lambda self: pending.fget(self) or _CLOSED_BY_CALLERS.get(self, 0) > 0)


async def _sleep_in_the_callers_task(
    self: Engine, level: int = 1, *, mode: str = "abort", timeout: float | None = None, keep_waiting: bool = False
) -> None:
    gate = self.runtime.gate
    _CLOSED_BY_CALLERS[gate] = _CLOSED_BY_CALLERS.get(gate, 0) + 1
    gate.serve()
    await self._changed(self.runtime.power.sleep(level, mode, timeout, keep_waiting=keep_waiting))
    _CLOSED_BY_CALLERS[gate] -= 1
    gate.serve()


_LATEST: dict[SessionActor, Request] = {}


def _note_the_latest(admit: Any) -> Any:
    async def mutant(runtime: Runtime, session: SessionActor, request: Request, *prompt: object) -> None:
        _LATEST[session] = request
        await admit(runtime, session, request, *prompt)

    return mutant


def _overwrite_the_unread(detach: Any) -> Any:
    def mutant(self: SessionActor) -> None:
        latest = _LATEST.get(self)
        if latest is not None and latest.has_unread:
            latest.outcome = Outcome(FinishReason.ABORT, Cause.SLEEP)
        detach(self)

    return mutant


def _wake_without_weights(wake: Any) -> Any:
    def mutant(self: ToyRunner, tags: frozenset[Tag]) -> None:
        discarded = self._weights is None
        wake(self, tags)
        if discarded and Tag.WEIGHTS in tags:
            self._weights = 7  # whatever lies there

    return mutant


_CRASHED = r"TransitionFailed\('the engine is closed'\)"  # the actor is gone


def _abort_before_the_check(sleep: Any) -> Any:
    def mutant(self: PowerActor, *arguments: Any, **flags: Any) -> PowerChange:
        try:
            change: PowerChange = sleep(self, *arguments, **flags)
        except RequestRejected:
            self._sessions.abort_all(Cause.SLEEP)
            raise
        return change

    return mutant


def _keep_all_unread(put: Any) -> Any:
    def mutant(self: StateSubscription, state: PowerState) -> None:
        self._unread = deque(self._unread)
        put(self, state)

    return mutant


def _go_on_at_the_end(put: Any) -> Any:
    def mutant(self: StateSubscription, state: PowerState) -> None:
        put(self, state)
        self._is_over = False

    return mutant


def _wait_for_begun_requests(finish: Any) -> Any:
    async def mutant(self: PowerActor, policy: InFlightPolicy, change: PowerChange) -> None:
        if policy.mode is not Mode.WAIT or policy.timeout is not None:
            await finish(self, policy, change)
            return
        while self._gate.ledger.running:
            await self._wait()
        self._gate.change_power(PowerEvent.QUIESCE)
        change.num_aborted += self._sessions.abort_all(Cause.SLEEP)

    return mutant


POWER_MUTANTS = (
    Mutant(
        "F12",
        "the worker is told to sleep with work in flight",
        replaced(PowerActor, "_quiesce", lambda _: _do_not_wait),
        shows=f"sessions (exist|are there)|nothing sleeps, and|{_CRASHED}",
        machine="PowerMachine",
    ),
    Mutant(
        "F13",
        "requests are admitted while a sleep is pending",
        replaced(Gate, "is_awake", _admit_what_waits_for_its_turn),
        shows="admits|sleeps|is unanswered|nothing moves, and|was ended by error|is awake, and EngineAsleep"
        "|detach while preparing",
        machine="PowerMachine",
    ),
    Mutant(
        "F13b",
        "a partial wake opens the gate",
        replaced(PowerActor, "_take_back", _open_after_any_tag),
        shows="the worker (sleeps|has)|admits|sleeps, frozenset|WAKE for tags|the engine is|not there|does not exist",
        machine="PowerMachine",
    ),
    Mutant(
        "F14",
        "a wake that failed counts as one",
        replaced(PowerActor, "_check_answer", _believe_any_wake),
        shows="the worker (sleeps|has)|WAKE of what|was done, but|waits? forever|the weights that|sleep",
        machine="PowerMachine",
    ),
    Mutant(
        "F15",
        "what is awake already is woken again",
        replaced(SleepState, "to_wake", _wake_what_is_awake),
        shows=f"WAKE for tags that are awake|wake while the engine is awake|by shutdown|{_CRASHED}",
        machine="PowerMachine",
    ),
    Mutant(
        "F16",
        "blocks and prefix hashes from before a sleep or an update are used after it",
        together(
            replaced(Scheduler, "forget_all", _keep_what_was_computed), replaced(ToyRunner, "sleep", _keep_the_slots)
        ),
        shows="the model's|none of the weights|another history|sees something else|state of slot \\d+, which has none",
        machine="PowerMachine",
    ),
    Mutant(
        "F17",
        "the caller of sleep() is cancelled half-way, and the gate stays closed",
        together(
            replaced(Engine, "sleep", lambda _: _sleep_in_the_callers_task),
            replaced(Gate, "is_change_pending", _also_for_callers),
        ),
        shows="nothing sleeps, and|waits? forever",
        machine="PowerMachine",
    ),
    Mutant(
        "F43",
        "a sleep overwrites an answer that is finished and not read",
        together(replaced(session, "admit", _note_the_latest), replaced(SessionActor, "detach", _overwrite_the_unread)),
        shows="the whole answer|became|is an abort|the books count|aborted by|and (it )?goes on|no sleep aborts",
        machine="PowerMachine",
    ),
    Mutant(
        "F44",
        "a wake after level 2 serves weights that were never loaded",
        replaced(ToyRunner, "wake", _wake_without_weights),
        shows="the model's|of none of the weights",
        machine="PowerMachine",
    ),
    Mutant(
        "F65",
        "a sleep whose arguments are refused aborts requests",
        replaced(PowerActor, "sleep", _abort_before_the_check),
        shows="it was refused, and",
        machine="PowerMachine",
    ),
    Mutant(
        "F66",
        "an update to an empty path is made",
        replaced(power, "path_of", lambda _: str),
        shows="update to|machines announce changes|nothing sleeps, and EngineAsleep",
        machine="PowerMachine",
    ),
    Mutant(
        "F67",
        "the states that a slow reader did not read fill memory",
        replaced(StateSubscription, "put", _keep_all_unread),
        shows="read was",
        machine="PowerMachine",
    ),
    Mutant(
        "F67b",
        "a reader of the states that has left is kept",
        replaced(StateSubscription, "__exit__", lambda _: lambda *_: None),
        shows="all callers have gone",
        machine="PowerMachine",
    ),
    Mutant(
        "F67c",
        "a reader of the states waits after the end of the engine",
        replaced(StateSubscription, "put", _go_on_at_the_end),
        shows="its states go on",
        machine="PowerMachine",
    ),
    Mutant(
        "F110",
        "a sleep that waits for requests aborts those without a token",
        replaced(PowerActor, "_finish", _wait_for_begun_requests),
        shows="no sleep aborts requests",
        machine="PowerMachine",
    ),
)
