"""The power actor: puts the engine to sleep, wakes it and gives it other weights, one after the other.

Whoever asks is one in a queue from the first step of the call, and from a sleep or an update that is asked for until it
is done the gate is closed. The actor does them in turn; a caller that is cancelled abandons its wait, not the change.

The engine owns what the worker is to be: which weights, and what of it sleeps. A worker that dies asleep is not started
again before something needs it; then it starts as the engine says it should be.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import trio

from trioengine.actors.gate import Gate
from trioengine.actors.link import Link
from trioengine.actors.power_change import (
    InFlightPolicy,
    Mode,
    PowerChange,
    PowerState,
    StateSubscription,
    Weights,
    check_policy,
    level_of,
    path_of,
    tags_of,
)
from trioengine.actors.recovery import Recovery
from trioengine.actors.sessions import Sessions
from trioengine.actors.supervisor import Supervisor
from trioengine.core.errors import ModelError, TransitionFailed
from trioengine.core.ledger import Ledger
from trioengine.core.lifecycle import Phase, Power, PowerEvent
from trioengine.core.messages import ControlReply, Sleep, Slept, UpdateWeights, Wake
from trioengine.core.power import DesiredWorker, SleepState, Tag, WeightsState, desired_worker, sorted_tags
from trioengine.core.types import Cause

logger = logging.getLogger("trioengine")
DO_NOT_WAKE = "the weights are updated, but do not wake"
_OVER = (Power.DRAINING, Power.CLOSED)


class PowerActor:
    """Sleep, wake and update_weights of one engine.

    `check_model` raises ModelError where the files at a path cannot be the same model with other weights.
    """

    def __init__(
        self,
        gate: Gate,
        sessions: Sessions,
        recovery: Recovery,
        supervisor: Supervisor,
        check_model: Callable[[str], Awaitable[None]],
    ) -> None:
        self.weights = Weights("", 1)
        self.memory = SleepState()
        self._gate = gate
        self._sessions = sessions
        self._recovery = recovery
        self._supervisor = supervisor
        self._check_model = check_model
        self._queue: deque[PowerChange] = deque()  # the first one is being made
        self._closure = Closure(gate.ledger)
        self._finishing = False  # requests in flight, before a sleep or an update
        self._waits_for_worker = False  # for a change that is made asleep, or in place of one that retires
        self._is_over = False
        self._listeners: set[StateSubscription] = set()
        self._published = self.state

    @property
    def state(self) -> PowerState:
        """As it is now."""
        return PowerState(self._gate.power, self.memory.level, self.memory.asleep, self.weights.version)

    @property
    def desired_worker(self) -> DesiredWorker:
        """What a worker is needed for now."""
        return desired_worker(
            self._gate.power,
            self.memory.asleep,
            in_flight=self._gate.ledger.in_flight,
            is_finishing=self._finishing,
            is_changing=self._waits_for_worker,
        )

    def states(self) -> StateSubscription:
        """For a listener that hears of each change."""
        return StateSubscription(self._listeners, lambda: self.state)

    def publish(self) -> None:
        """Put the state to every listener, if it has changed."""
        state = self.state
        if state != self._published:
            self._published = state
            for listener in self._listeners:
                listener.put(state)

    # ---- what users ask; the first step of each is the whole of it ------------------------------------------------

    def sleep(self, level: int, mode: str, timeout: float | None, *, keep_waiting: bool) -> PowerChange:
        level, policy = level_of(level), check_policy(mode, timeout, keep_waiting=keep_waiting)
        return self._ask_to_close(f"sleep at level {level}", policy, lambda: self._sleep(level, policy))

    def wake(self, tags: Collection[str] | None, *, reload: bool) -> PowerChange:
        wanted = tags_of(tags)
        name = f"wake of {' and '.join(tag.value for tag in sorted_tags(wanted))}"
        return self._ask(PowerChange(name, lambda: self._wake(wanted, reload=reload), blocks_admission=False))

    def update_weights(self, path: str | Path, mode: str, timeout: float | None) -> PowerChange:
        checked, policy = path_of(path), check_policy(mode, timeout)
        return self._ask_to_close(f"update to {checked}", policy, lambda: self._update(checked, policy))

    def _ask_to_close(self, name: str, policy: InFlightPolicy, make: Callable[[], Awaitable[None]]) -> PowerChange:
        change = self._ask(PowerChange(f"{name} ({policy.mode.value})", make, blocks_admission=True))
        self._closure.begin()
        if policy.aborts_waiting:  # before the gate closes, which refuses those that wait for a slot only
            change.num_aborted += self._sessions.abort_waiting(Cause.SLEEP)
        self._gate.begin_pending()
        change.num_aborted += self._sessions.abort_phase(Phase.PREPARING, Cause.SLEEP)
        if policy.mode is Mode.ABORT and self._gate.power in (Power.FALLING_ASLEEP, Power.UPDATING):
            change.num_aborted += self._sessions.abort_all(Cause.SLEEP)  # nor does one before it wait for them
        return change

    def _ask(self, change: PowerChange) -> PowerChange:
        if self._is_over:
            raise TransitionFailed("the engine is closed")
        if self._gate.power is Power.LOADING or self._gate.power in _OVER:
            raise TransitionFailed(f"the engine is {self._gate.power.value}")
        self._queue.append(change)
        self._gate.notify()
        return change

    # ---- the task -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Service: make the changes in turn, until cancelled; then those that are left have failed."""
        try:
            while True:
                while not self._queue:
                    await self._gate.changed()
                await self._make(self._queue[0])
        finally:
            self._is_over = True
            while self._queue:
                self._end(self._queue[0], TransitionFailed("the engine is closed"))
            self._closure.end()

    async def _make(self, change: PowerChange) -> None:
        try:
            if self._gate.power in _OVER:
                raise TransitionFailed(f"the engine is {self._gate.power.value}")
            await change.make()
        except TransitionFailed as exc:
            self._end(change, exc)
        else:
            self._end(change, None)

    def _end(self, change: PowerChange, failure: TransitionFailed | None) -> None:
        self._queue.remove(change)
        change.failure = failure
        change.done.set()
        if failure is None:
            state = self._gate.power.value.replace("_", " ")
            change.log("the engine is %s, with weights %d", state, self.weights.version)
        else:
            logger.warning("%s failed: %s", change.name, failure)
        if change.blocks_admission:
            self._gate.end_pending()
        if not (self.memory.asleep or self._gate.num_pending):
            self._closure.end()

    # ---- the changes ----------------------------------------------------------------------------------------------

    async def _sleep(self, level: int, policy: InFlightPolicy) -> None:
        self.memory.check_sleep(level)
        if self.memory.asleep and policy.mode is Mode.ABORT:
            self._queue[0].num_aborted += self._sessions.abort_phase(Phase.SUSPENDED, Cause.SLEEP)
        if self.memory.sleeps_at(level):
            self.memory = self.memory.slept(level)
            return
        self._begin(PowerEvent.SLEEP, policy)
        await self._quiesce(policy)
        while self._gate.link is None and self._supervisor.current is not None:  # one starts
            await self._wait(Power.FALLING_ASLEEP)
        if self._gate.link is None:
            pass  # there is no worker: its memory is given back
        elif level == 1:
            await self._gate.link.ask(Sleep())
        else:
            await self._retire()
        self._check_power(Power.FALLING_ASLEEP)
        self.memory = self.memory.slept(level)
        self._gate.change_power(PowerEvent.SLEPT)

    async def _wake(self, wanted: frozenset[Tag], *, reload: bool) -> None:
        if not self.memory.asleep:
            self._gate.change_power(PowerEvent.WAKE)  # it is awake
            return
        tags = self.memory.to_wake(wanted, reload=reload)
        if tags:
            self._gate.change_power(PowerEvent.WAKE)
            await self._take_back(tags)
        if Tag.WEIGHTS in wanted - tags:
            self.memory = self.memory.awaiting_update()

    async def _take_back(self, tags: frozenset[Tag]) -> None:
        try:
            link = await self._link(Power.WAKING)
            answer = await link.ask(Wake(sorted_tags(tags)))
            self._check_power(Power.WAKING)
            self._check_answer(answer)
        except TransitionFailed:
            if self._gate.power is Power.WAKING:
                self._gate.change_power(PowerEvent.FAILED)
            raise
        self.memory = self.memory.woken(tags)
        if self.memory.asleep:
            self._gate.change_power(PowerEvent.PARTLY_WOKEN)
        else:
            self._go_on(PowerEvent.WOKEN)

    async def _update(self, path: str, policy: InFlightPolicy) -> None:
        if self.memory.asleep:
            await self._update_asleep(path, policy)
            return
        self._begin(PowerEvent.UPDATE, policy)
        try:
            await self._check_files(path, Power.UPDATING)
            await self._quiesce(policy)
            await self._load(path, Power.UPDATING)
        except TransitionFailed:
            if self._gate.power is Power.UPDATING:
                self._go_on(PowerEvent.FAILED)
            raise
        self._go_on(PowerEvent.UPDATED)

    async def _update_asleep(self, path: str, policy: InFlightPolicy) -> None:
        self._waits_for_worker = True
        self._gate.change_power(PowerEvent.UPDATE)
        try:
            await self._check_files(path, Power.ASLEEP)
            if policy.mode is Mode.ABORT:
                self._queue[0].num_aborted += self._sessions.abort_phase(Phase.SUSPENDED, Cause.SLEEP)
            await self._load(path, Power.ASLEEP)
        except TransitionFailed:
            if self._gate.power is Power.ASLEEP:
                self._gate.change_power(PowerEvent.FAILED)
            raise
        finally:
            self._waits_for_worker = False
        self._gate.change_power(PowerEvent.UPDATED)
        was_awaited = self.memory.weights is WeightsState.AWAITING_UPDATE
        self.memory = self.memory.updated()
        if was_awaited:
            self._gate.change_power(PowerEvent.WAKE)
            try:
                await self._take_back(frozenset({Tag.WEIGHTS}))
            except TransitionFailed as exc:
                raise TransitionFailed(f"{DO_NOT_WAKE}: {exc}") from exc

    # ---- steps of them --------------------------------------------------------------------------------------------

    def _begin(self, event: PowerEvent, policy: InFlightPolicy) -> None:
        self._finishing = policy.mode is Mode.WAIT and not self.memory.asleep
        self._gate.change_power(event)
        ledger = self._gate.ledger
        self._queue[0].log("begins; requests in flight: %d, sessions: %d", ledger.in_flight, ledger.sessions)

    async def _quiesce(self, policy: InFlightPolicy) -> None:
        """Until the worker holds no session; requests in flight have ended by then, or are suspended."""
        expected, ledger = self._gate.power, self._gate.ledger
        if self._finishing:
            self._queue[0].log("waits for requests in flight: %d, timeout: %s", ledger.in_flight, policy.timeout)
            with trio.move_on_after(float("inf") if policy.timeout is None else policy.timeout):
                while ledger.in_flight:
                    await self._wait(expected)
            self._finishing = False
        if policy.mode is not Mode.KEEP and not self.memory.asleep:
            self._queue[0].num_aborted += self._sessions.abort_all(Cause.SLEEP)
        num_detached = self._sessions.detach_all()
        self._recovery.forget_suspects()
        counts = (self._queue[0].num_aborted, ledger.suspended, num_detached)
        self._queue[0].log("requests aborted: %d, suspended: %d; sessions detached: %d", *counts)
        while self._sessions.any_on_worker:
            await self._wait(expected)

    async def _check_files(self, path: str, expected: Power) -> None:
        """As far as they tell without the weights: nothing is aborted for what cannot be the same model."""
        try:
            await self._check_model(path)
        except ModelError as exc:
            raise TransitionFailed(str(exc)) from exc
        self._check_power(expected)

    async def _load(self, path: str, expected: Power) -> None:
        weights = Weights(path, self.weights.version + 1)
        link = await self._link(expected)
        self._check_answer(await link.ask(UpdateWeights(path, weights.version)))
        self.weights = weights

    async def _retire(self) -> None:
        """Until the worker has exited, and with it all that its libraries keep; a fresh one takes its place, asleep."""
        self._gate.link = None
        self._supervisor.retire()
        self._waits_for_worker = True
        try:
            while self._supervisor.is_retiring:
                await self._wait(Power.FALLING_ASLEEP)
        finally:
            self._waits_for_worker = False

    def _go_on(self, event: PowerEvent) -> None:
        """The engine is awake again; or it restarts: it has no worker, or one that tries suspects."""
        link = self._gate.link
        if link is not None:
            self._recovery.resume(link)
        is_awake = link is not None and not self._recovery.has_suspects
        self._gate.change_power(event if is_awake else PowerEvent.LEFT_ALONE)

    async def _link(self, expected: Power) -> Link:
        """To a worker that is READY; TransitionFailed when one is lost before."""
        last_loss = self._supervisor.last_loss
        while self._gate.link is None:
            await self._wait(expected)
            if self._supervisor.last_loss is not last_loss:
                raise self._lost()
        return self._gate.link

    async def _wait(self, expected: Power) -> None:
        """For something to change; TransitionFailed when the engine is not in this state any more."""
        await self._gate.changed()
        self._check_power(expected)

    def _check_power(self, expected: Power) -> None:
        if self._gate.power is not expected:
            raise TransitionFailed(f"the engine is {self._gate.power.value}")

    def _check_answer(self, answer: ControlReply | None) -> None:
        if answer is None:
            raise self._lost()
        if not isinstance(answer, Slept) and answer.error is not None:
            raise TransitionFailed(answer.error)

    def _lost(self) -> TransitionFailed:
        return TransitionFailed(str(self._supervisor.last_loss))


class Closure:
    """Counts the refusals of one engine between `begin` and `end`; each is harmless when repeated."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rejected_before: int | None = None  # None: the gate is open

    def begin(self) -> None:
        if self._rejected_before is None:
            self._rejected_before = self._ledger.rejected

    def end(self) -> None:
        """Log how many sessions and requests were refused, if any were."""
        if self._rejected_before is None:
            return
        refused = self._ledger.rejected - self._rejected_before
        self._rejected_before = None
        if refused:
            logger.info("sessions and requests refused while the engine slept or was updated: %d", refused)
