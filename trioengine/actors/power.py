"""The power actor: puts the engine to sleep, wakes it and gives it other weights, one after the other.

Every call is queued in its first step (`Gate.changes`); a sleep or an update closes the gate in that step, until it is
done and nothing sleeps. The actor makes the changes in turn. A caller that is cancelled abandons its wait, not the
change.

The state is one variable, `Gate.stage`, moved by the table in core/lifecycle.py. During a change it is moved by this
actor alone, or by a drain or a close of the engine: then the change fails at its next step. `memory` and `weights` are
the record of the worker's content. A worker that dies asleep is not started again before it is needed, and then starts
as recorded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection
from functools import partial
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
from trioengine.core.lifecycle import Power, PowerEvent, PowerStage
from trioengine.core.messages import ControlReply, Sleep, Slept, UpdateWeights, Wake
from trioengine.core.power import DesiredWorker, SleepState, Tag, WeightsState, desired_worker, sorted_tags
from trioengine.core.types import Cause

logger = logging.getLogger("trioengine")
DO_NOT_WAKE = "the weights are updated, but do not wake"


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
        self._closure = Closure(gate.ledger)
        self._listeners: set[StateSubscription] = set()
        self._published = self.state

    @property
    def state(self) -> PowerState:
        """The engine's state at this moment."""
        return PowerState(self._gate.power, self.memory.level, self.memory.asleep, self.weights.version)

    @property
    def desired_worker(self) -> DesiredWorker:
        """The worker that the engine wants at this moment."""
        return desired_worker(self._gate.stage, self.memory.asleep, in_flight=self._gate.ledger.in_flight)

    def states(self) -> StateSubscription:
        """Return a subscription to the states, of which the first one is the present state."""
        return StateSubscription(self._listeners, lambda: self.state)

    def publish(self) -> None:
        """Put the state to every listener, if it has changed."""
        state = self.state
        if state != self._published:
            self._published = state
            for listener in self._listeners:
                listener.put(state)

    # ---- requests for changes, queued in one step -----------------------------------------------------------------

    def sleep(self, level: int, mode: str, timeout: float | None, *, keep_waiting: bool) -> PowerChange:
        level, policy = level_of(level), check_policy(mode, timeout, keep_waiting=keep_waiting)
        name = f"sleep at level {level} ({policy.mode.value})"
        return self._close_gate(PowerChange(name, partial(self._sleep, level, policy), blocks_admission=True), policy)

    def wake(self, tags: Collection[str] | None, *, reload: bool) -> PowerChange:
        wanted = tags_of(tags)
        name = f"wake of {' and '.join(tag.value for tag in sorted_tags(wanted))}"
        self._check_running()
        change = PowerChange(name, partial(self._wake, wanted, reload), blocks_admission=False)
        self._gate.begin_change(change)
        return change

    def update_weights(self, path: str | Path, mode: str, timeout: float | None) -> PowerChange:
        checked, policy = path_of(path), check_policy(mode, timeout)
        name = f"update to {checked} ({policy.mode.value})"
        return self._close_gate(
            PowerChange(name, partial(self._update, checked, policy), blocks_admission=True), policy
        )

    def _close_gate(self, change: PowerChange, policy: InFlightPolicy) -> PowerChange:
        """Queue a sleep or an update, which closes the gate, and abort at once whatever need not wait for its turn."""
        self._check_running()
        self._closure.begin()
        if policy.aborts_waiting:  # before the gate closes, which refuses those that wait for a slot only
            change.num_aborted += self._sessions.abort_waiting(Cause.SLEEP)
        self._gate.begin_change(change)
        change.num_aborted += self._sessions.abort_preparing(Cause.SLEEP)
        if policy.mode is Mode.ABORT and self._gate.power in (Power.FALLING_ASLEEP, Power.UPDATING):
            change.num_aborted += self._sessions.abort_all(Cause.SLEEP)  # nor does the change before it wait for them
        return change

    def _check_running(self) -> None:
        """Raise TransitionFailed while the engine loads, drains or is closed."""
        if self._gate.power is Power.LOADING or self._gate.is_ending:
            raise TransitionFailed(f"the engine is {self._gate.power.value}")

    # ---- the task -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Service: make the changes in turn, until cancelled; then the engine is closed, and those left have failed."""
        changes = self._gate.changes
        try:
            while True:
                while not changes:
                    await self._gate.changed()
                await self._make(changes[0])
        finally:
            self._gate.change_power(PowerEvent.CLOSE)  # no change is queued any more
            while changes:
                self._end(changes[0], TransitionFailed("the engine is closed"))
            self._closure.end()

    async def _make(self, change: PowerChange) -> None:
        try:
            self._check_running()
            await change.make(change)
        except TransitionFailed as exc:
            self._undo()
            self._end(change, exc)
        else:
            self._end(change, None)

    def _undo(self) -> None:
        """Leave the stage of a change that failed; a sleep fails only where the engine ends."""
        match self._gate.stage:
            case PowerStage.WAKING | PowerStage.UPDATING_ASLEEP:
                self._gate.change_power(PowerEvent.FAILED)
            case PowerStage.FINISHING_TO_UPDATE | PowerStage.UPDATING:
                self._go_on(PowerEvent.FAILED)

    def _end(self, change: PowerChange, failure: TransitionFailed | None) -> None:
        change.failure = failure
        change.done.set()
        if failure is None:
            state = self._gate.power.value.replace("_", " ")
            change.log("the engine is %s, with weights %d", state, self.weights.version)
        else:
            logger.warning("%s failed: %s", change.name, failure)
        self._gate.end_change(change)
        if not (self.memory.asleep or self._gate.is_change_pending):
            self._closure.end()

    # ---- the changes ----------------------------------------------------------------------------------------------

    async def _sleep(self, level: int, policy: InFlightPolicy, change: PowerChange) -> None:
        self.memory.check_sleep(level)
        if self.memory.asleep and policy.mode is Mode.ABORT:
            change.num_aborted += self._sessions.abort_all(Cause.SLEEP)
        if self.memory.sleeps_at(level):
            self.memory = self.memory.slept(level)
            return
        self._begin(PowerEvent.SLEEP, change)
        await self._quiesce(policy, change)
        while self._gate.link is None and self._supervisor.current is not None:  # one starts
            await self._wait()
        if self._gate.link is None:
            pass  # without a worker its memory is free
        elif level == 1:
            await self._gate.link.ask(Sleep())
        else:
            await self._retire()
        self._check_running()
        self.memory = self.memory.slept(level)
        self._gate.change_power(PowerEvent.SLEPT)

    async def _wake(self, wanted: frozenset[Tag], reload: bool, change: PowerChange) -> None:
        tags = self.memory.to_wake(wanted, reload=reload)
        if tags:
            await self._take_back(tags)
        if Tag.WEIGHTS in wanted - tags:
            self.memory = self.memory.awaiting_update()

    async def _take_back(self, tags: frozenset[Tag]) -> None:
        self._gate.change_power(PowerEvent.WAKE)
        link = await self._link()
        answer = await link.ask(Wake(sorted_tags(tags)))
        self._check_running()
        self._check_answer(answer)
        self.memory = self.memory.woken(tags)
        if self.memory.asleep:
            self._gate.change_power(PowerEvent.PARTLY_WOKEN)
        else:
            self._go_on(PowerEvent.WOKEN)

    async def _update(self, path: str, policy: InFlightPolicy, change: PowerChange) -> None:
        if self.memory.asleep:
            await self._update_asleep(path, policy, change)
            return
        self._begin(PowerEvent.UPDATE, change)
        await self._check_files(path)
        await self._quiesce(policy, change)
        await self._load(path)
        self._go_on(PowerEvent.UPDATED)

    async def _update_asleep(self, path: str, policy: InFlightPolicy, change: PowerChange) -> None:
        self._gate.change_power(PowerEvent.UPDATE)
        await self._check_files(path)
        if policy.mode is Mode.ABORT:
            change.num_aborted += self._sessions.abort_all(Cause.SLEEP)
        await self._load(path)
        self._gate.change_power(PowerEvent.UPDATED)
        was_awaited = self.memory.weights is WeightsState.AWAITING_UPDATE
        self.memory = self.memory.updated()
        if was_awaited:
            try:
                await self._take_back(frozenset({Tag.WEIGHTS}))
            except TransitionFailed as exc:
                raise TransitionFailed(f"{DO_NOT_WAKE}: {exc}") from exc

    # ---- their steps ----------------------------------------------------------------------------------------------

    def _begin(self, event: PowerEvent, change: PowerChange) -> None:
        self._gate.change_power(event)
        ledger = self._gate.ledger
        change.log("begins; requests in flight: %d, sessions: %d", ledger.in_flight, ledger.sessions)

    async def _quiesce(self, policy: InFlightPolicy, change: PowerChange) -> None:
        """Wait until the worker holds no session: requests in flight have finished, or are aborted or suspended."""
        if not self.memory.asleep:
            await self._finish(policy, change)
        num_detached = self._sessions.detach_all()
        self._recovery.forget_suspects()
        counts = (change.num_aborted, self._gate.ledger.suspended, num_detached)
        change.log("requests aborted: %d, suspended: %d; sessions detached: %d", *counts)
        while self._sessions.any_on_worker:
            await self._wait()

    async def _finish(self, policy: InFlightPolicy, change: PowerChange) -> None:
        """Let requests in flight finish where the policy waits for them; abort the rest unless it keeps them."""
        if policy.mode is Mode.WAIT:
            ledger = self._gate.ledger
            change.log("waits for requests in flight: %d, timeout: %s", ledger.in_flight, policy.timeout)
            with trio.move_on_after(math.inf if policy.timeout is None else policy.timeout):
                while ledger.in_flight:
                    await self._wait()
        self._gate.change_power(PowerEvent.QUIESCE)
        if policy.mode is not Mode.KEEP:
            change.num_aborted += self._sessions.abort_all(Cause.SLEEP)

    async def _check_files(self, path: str) -> None:
        """Check the files without loading them, so that nothing is aborted for files of another model."""
        try:
            await self._check_model(path)
        except ModelError as exc:
            raise TransitionFailed(str(exc)) from exc
        self._check_running()

    async def _load(self, path: str) -> None:
        weights = Weights(path, self.weights.version + 1)
        link = await self._link()
        self._check_answer(await link.ask(UpdateWeights(path, weights.version)))
        if self._gate.stage is PowerStage.CLOSED:  # the last state was published
            raise TransitionFailed("the engine is closed")
        self.weights = weights

    async def _retire(self) -> None:
        """Wait until the worker has exited, and with it whatever its libraries hold; a fresh one starts asleep."""
        self._gate.change_power(PowerEvent.RETIRE)
        self._gate.link = None
        self._supervisor.retire()
        while self._supervisor.is_retiring:
            await self._wait()

    def _go_on(self, event: PowerEvent) -> None:
        """Leave the change: the engine is awake, or restarts where it has no worker or one that probes suspects."""
        link = self._gate.link
        if link is not None:
            self._recovery.resume(link)
        is_awake = link is not None and not self._recovery.has_suspects
        self._gate.change_power(event if is_awake else PowerEvent.LEFT_ALONE)

    async def _link(self) -> Link:
        """Wait for a worker that is READY, and return the link to it; raises TransitionFailed if one is lost before."""
        last_loss = self._supervisor.last_loss
        while self._gate.link is None:
            await self._wait()
            if self._supervisor.last_loss is not last_loss:
                raise self._lost()
        return self._gate.link

    async def _wait(self) -> None:
        """Wait for any change in the engine. Raises TransitionFailed if it drains or is closed."""
        await self._gate.changed()
        self._check_running()

    def _check_answer(self, answer: ControlReply | None) -> None:
        if answer is None:
            raise self._lost()
        if not isinstance(answer, Slept) and answer.error is not None:
            raise TransitionFailed(answer.error)

    def _lost(self) -> TransitionFailed:
        return TransitionFailed(str(self._supervisor.last_loss))


class Closure:
    """Logs how many callers were refused between `begin` and `end`; each is harmless when repeated."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rejected_before: int | None = None  # None: the gate is open

    def begin(self) -> None:
        if self._rejected_before is None:
            self._rejected_before = self._ledger.rejected

    def end(self) -> None:
        if self._rejected_before is None:
            return
        refused = self._ledger.rejected - self._rejected_before
        self._rejected_before = None
        if refused:
            logger.info("sessions and requests refused while the engine slept or was updated: %d", refused)
