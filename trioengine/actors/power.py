"""The power actor: puts the engine to sleep, wakes it and gives it other weights, one after the other.

Whoever asks is one in a queue from the first step of the call, and from a sleep or an update that is asked for until it
is done the gate is closed. The actor does them in turn; a caller that is cancelled abandons its wait, not the change.

The engine owns what the worker is to be: which weights, and what of it sleeps. A worker that dies asleep is not started
again before something needs it; then it starts as the engine says it should be.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from trioengine.actors.link import Link
from trioengine.actors.states import PowerState, States
from trioengine.core.bounds import brief, integer, number
from trioengine.core.config import MAX_SECONDS
from trioengine.core.errors import ModelError, TransitionFailed
from trioengine.core.lifecycle import Cause, Phase, Power, PowerEvent
from trioengine.core.messages import Sleep, Slept, Updated, UpdateWeights, Wake, Woken
from trioengine.core.tag import ALL_TAGS, Tag

if TYPE_CHECKING:
    from trioengine.actors.engine import Engine

MAX_PATH = 4096  # characters
DO_NOT_WAKE = "the weights are updated, but do not wake"
_OVER = (Power.DRAINING, Power.CLOSED)


class Mode(enum.Enum):
    """What a sleep or an update does with the requests that run."""

    ABORT = "abort"  # they end, with cause `sleep` and what came until then
    WAIT = "wait"  # they finish; after the timeout the rest is aborted
    KEEP = "keep"  # they are suspended, and go on afterwards


class Weights(NamedTuple):
    """What the model is made of: a file or directory, and how many there were with it."""

    path: str
    version: int


@dataclass(eq=False)
class _Change:
    """One that was asked for."""

    make: Callable[[], Awaitable[None]]
    closes_gate: bool
    done: trio.Event = field(default_factory=trio.Event)
    failure: TransitionFailed | None = None

    async def wait(self) -> None:
        """Until it is done; raises TransitionFailed if it failed."""
        await self.done.wait()
        if self.failure is not None:
            raise TransitionFailed(str(self.failure)) from self.failure


@dataclass(eq=False)
class _Asked:
    """A message that waits for its answer."""

    answered: trio.Event = field(default_factory=trio.Event)
    answer: Slept | Woken | Updated | None = None  # None: the worker was lost


class PowerActor:
    """Sleep, wake and update_weights of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.weights = Weights("", 1)
        self.asleep: frozenset[Tag] = frozenset()
        self.level = 0  # at which it fell asleep last
        self._engine = engine
        self._gate = engine.gate
        self._queue: deque[_Change] = deque()
        self._asked: _Asked | None = None
        self._mode = Mode.WAIT  # of the sleep or update that is being made
        self._discarded = False  # the weights, at level 2
        self._retires = False  # the worker was told to
        self._wants_fresh = False  # one in its place, asleep
        self._awaits_update = False  # the weights are left asleep until they are updated
        self._wants_worker = False  # for a change that is made asleep
        self._is_over = False
        self._listeners: set[States] = set()
        self._told = self.state
        self._gate.on_power = self._publish

    @property
    def state(self) -> PowerState:
        """As it is now."""
        level = self.level if self.asleep else None
        return PowerState(self._gate.power, level, self.asleep, self.weights.version)

    def states(self) -> States:
        """For a listener that hears of each change."""
        return States(self._listeners, lambda: self.state)

    def _publish(self) -> None:
        state = self.state
        if state != self._told:
            self._told = state
            for listener in self._listeners:
                listener.put(state)

    # ---- what the engine asks -------------------------------------------------------------------------------------

    @property
    def wants_worker(self) -> bool:
        """Whether a worker that was lost is to be replaced now."""
        match self._gate.power:
            case Power.CLOSED:
                return False
            case Power.ASLEEP:
                return self._wants_worker or self._wants_fresh
            case Power.FALLING_ASLEEP:
                return self._wants_fresh or (self._gate.ledger.in_flight > 0 and self._mode is Mode.WAIT)
            case Power.DRAINING:
                return not self.asleep
        return True

    @property
    def starts_asleep(self) -> frozenset[Tag]:
        """What of a worker that starts now is to sleep."""
        return ALL_TAGS if self._wants_fresh else self.asleep

    @property
    def runs_requests(self) -> bool:
        """Whether suspended requests may go on where there is a worker."""
        match self._gate.power:
            case Power.ASLEEP | Power.WAKING:
                return False
            case Power.FALLING_ASLEEP | Power.UPDATING:
                return self._mode is Mode.WAIT and not self.asleep
        return not self.asleep

    # ---- what users ask; the first step of each is the whole of it ------------------------------------------------

    def sleep(self, level: int, mode: str, timeout: float | None) -> _Change:
        try:
            level = integer(level, 1, 2)
        except ValueError as exc:
            raise ValueError(f"level {exc}") from None
        chosen = _mode(mode, timeout)
        change = self._ask(lambda: self._sleep(level, chosen, timeout), closes_gate=True)
        self._hurry(chosen)
        return change

    def wake(self, tags: Collection[str] | None, *, reload: bool) -> _Change:
        wanted = ALL_TAGS if tags is None else _tags(tags)
        return self._ask(lambda: self._wake(wanted, reload=reload), closes_gate=False)

    def update_weights(self, path: str | Path, mode: str, timeout: float | None) -> _Change:
        checked, chosen = _path(path), _mode(mode, timeout)
        change = self._ask(lambda: self._update(checked, chosen, timeout), closes_gate=True)
        self._hurry(chosen)
        return change

    def _hurry(self, mode: Mode) -> None:
        """What aborts does not wait for one before it that lets requests finish."""
        if mode is Mode.ABORT and self._gate.power in (Power.FALLING_ASLEEP, Power.UPDATING):
            self._engine.abort_all(Cause.SLEEP)

    def _ask(self, make: Callable[[], Awaitable[None]], *, closes_gate: bool) -> _Change:
        if self._is_over:
            raise TransitionFailed("the engine is closed")
        if self._gate.power is Power.LOADING or self._gate.power in _OVER:
            raise TransitionFailed(f"the engine is {self._gate.power.value}")
        change = _Change(make, closes_gate)
        self._queue.append(change)
        if closes_gate:
            self._gate.begin_pending()
            self._engine.abort_phase(Phase.PREPARING, Cause.SLEEP)
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

    async def _make(self, change: _Change) -> None:
        try:
            if self._gate.power in _OVER:
                raise TransitionFailed(f"the engine is {self._gate.power.value}")
            await change.make()
        except TransitionFailed as exc:
            self._end(change, exc)
        else:
            self._end(change, None)

    def _end(self, change: _Change, failure: TransitionFailed | None) -> None:
        self._queue.remove(change)
        change.failure = failure
        change.done.set()
        if change.closes_gate:
            self._gate.end_pending()

    # ---- the changes ----------------------------------------------------------------------------------------------

    async def _sleep(self, level: int, mode: Mode, timeout: float | None) -> None:
        if self.asleep:
            if level < self.level and Tag.WEIGHTS in self.asleep:
                raise TransitionFailed(f"it sleeps at level {self.level}: the weights are discarded")
            if mode is Mode.ABORT:
                self._engine.abort_phase(Phase.SUSPENDED, Cause.SLEEP)
            if self.asleep == ALL_TAGS and level == self.level:
                self._awaits_update = False
                return
        self._mode = mode
        self._gate.change_power(PowerEvent.SLEEP)
        await self._quiesce(mode, timeout)
        while self._gate.link is None and self._engine.is_starting:
            await self._wait(Power.FALLING_ASLEEP)
        if self._gate.link is None:
            pass  # there is no worker: its memory is given back
        elif level == 1:
            await self._tell(self._gate.link, Sleep())
        else:
            await self._retire()
        self._check_power(Power.FALLING_ASLEEP)
        self.asleep, self.level = ALL_TAGS, level
        self._discarded, self._awaits_update = level == 2, False
        self._gate.change_power(PowerEvent.SLEPT)

    async def _wake(self, wanted: frozenset[Tag], *, reload: bool) -> None:
        if not self.asleep:
            self._gate.change_power(PowerEvent.WAKE)  # it is awake
            return
        wanted &= self.asleep
        waits = self._discarded and not reload and Tag.WEIGHTS in wanted
        if waits:
            wanted -= {Tag.WEIGHTS}
        if wanted:
            self._gate.change_power(PowerEvent.WAKE)
            await self._take_back(wanted)
        self._awaits_update |= waits

    async def _take_back(self, tags: frozenset[Tag]) -> None:
        try:
            answer = await self._tell(await self._link(Power.WAKING), Wake(tuple(sorted(tags, key=_value))))
            self._check_power(Power.WAKING)
            self._check_answer(answer)
        except TransitionFailed:
            if self._gate.power is Power.WAKING:
                self._gate.change_power(PowerEvent.FAILED)
            raise
        self.asleep -= tags
        if Tag.WEIGHTS in tags:
            self._discarded = self._awaits_update = False
        if self.asleep:
            self._gate.change_power(PowerEvent.PARTLY_WOKEN)
        else:
            self._go_on(PowerEvent.WOKEN)

    async def _update(self, path: str, mode: Mode, timeout: float | None) -> None:
        if self.asleep:
            await self._update_asleep(path, mode)
            return
        self._mode = mode
        self._gate.change_power(PowerEvent.UPDATE)
        try:
            await self._check_model(path, Power.UPDATING)
            await self._quiesce(mode, timeout)
            await self._load(path, Power.UPDATING)
        except TransitionFailed:
            if self._gate.power is Power.UPDATING:
                self._go_on(PowerEvent.FAILED)
            raise
        self._go_on(PowerEvent.UPDATED)

    async def _update_asleep(self, path: str, mode: Mode) -> None:
        self._wants_worker = True
        self._gate.change_power(PowerEvent.UPDATE)
        try:
            await self._check_model(path, Power.ASLEEP)
            if mode is Mode.ABORT:
                self._engine.abort_phase(Phase.SUSPENDED, Cause.SLEEP)
            await self._load(path, Power.ASLEEP)
        except TransitionFailed:
            if self._gate.power is Power.ASLEEP:
                self._gate.change_power(PowerEvent.FAILED)
            raise
        finally:
            self._wants_worker = False
        self._gate.change_power(PowerEvent.UPDATED)
        self._discarded = False
        if self._awaits_update:
            self._awaits_update = False
            self._gate.change_power(PowerEvent.WAKE)
            try:
                await self._take_back(frozenset({Tag.WEIGHTS}))
            except TransitionFailed as exc:
                raise TransitionFailed(f"{DO_NOT_WAKE}: {exc}") from exc

    async def _check_model(self, path: str, expected: Power) -> None:
        """As far as its files tell without the weights: nothing is aborted for what cannot be the same model."""
        try:
            await self._engine.check_model(path)
        except ModelError as exc:
            raise TransitionFailed(str(exc)) from exc
        self._check_power(expected)

    async def _load(self, path: str, expected: Power) -> None:
        version = self.weights.version + 1
        answer = await self._tell(await self._link(expected), UpdateWeights(path, version))
        self._check_answer(answer)
        self.weights = Weights(path, version)

    def _go_on(self, event: PowerEvent) -> None:
        """The engine is awake again, or has no worker."""
        link = self._gate.link
        if link is not None:
            self._engine.replays.resume(link)
        self._gate.change_power(event if link is not None else PowerEvent.LEFT_ALONE)

    # ---- steps of them --------------------------------------------------------------------------------------------

    async def _quiesce(self, mode: Mode, timeout: float | None) -> None:
        """Until the worker holds no session; requests in flight have ended by then, or are suspended."""
        expected, ledger = self._gate.power, self._gate.ledger
        if mode is Mode.WAIT and not self.asleep:
            with trio.move_on_after(float("inf") if timeout is None else timeout):
                while ledger.in_flight:
                    await self._wait(expected)
        if mode is not Mode.KEEP and not self.asleep:
            self._engine.abort_all(Cause.SLEEP)
        self._mode = Mode.KEEP  # from here on nothing goes on
        self._engine.detach_all()
        while self._engine.holds_sessions:
            await self._wait(expected)

    async def _link(self, expected: Power) -> Link:
        """To a worker that is READY; TransitionFailed when one is lost before."""
        losses = self._engine.num_losses
        while self._gate.link is None:
            await self._wait(expected)
            if self._engine.num_losses > losses:
                raise self._lost()
        return self._gate.link

    async def _retire(self) -> None:
        """Until the worker has exited, and with it all that its libraries keep; one that is asleep takes its place."""
        self._retires = self._wants_fresh = True
        self._engine.retire_worker()
        try:
            while self._retires:
                await self._wait(Power.FALLING_ASLEEP)
        except TransitionFailed:
            self._wants_fresh = False
            raise

    async def _tell(self, link: Link, message: Sleep | Wake | UpdateWeights) -> Slept | Woken | Updated | None:
        """Post it and wait for the answer; None when the worker is lost. A change that was posted is waited for."""
        self._asked = asked = _Asked()
        link.post(message)
        await asked.answered.wait()
        return asked.answer

    async def _wait(self, expected: Power) -> None:
        """For something to change; TransitionFailed when the engine is not in this state any more."""
        await self._gate.changed()
        self._check_power(expected)

    def _check_power(self, expected: Power) -> None:
        if self._gate.power is not expected:
            raise TransitionFailed(f"the engine is {self._gate.power.value}")

    def _check_answer(self, answer: Slept | Woken | Updated | None) -> None:
        if answer is None:
            raise self._lost()
        if not isinstance(answer, Slept) and answer.error is not None:
            raise TransitionFailed(answer.error)

    def _lost(self) -> TransitionFailed:
        return TransitionFailed(str(self._engine.last_loss))

    # ---- what the worker says -------------------------------------------------------------------------------------

    def on_answer(self, message: Slept | Woken | Updated) -> None:
        if self._asked is not None:
            self._asked.answer = message
            self._asked.answered.set()
            self._asked = None

    def on_ready(self) -> None:
        self._wants_fresh = False

    def on_worker_lost(self) -> None:
        self._wants_fresh &= self._retires
        self._retires = False
        if self._asked is not None:
            self._asked.answered.set()
            self._asked = None


def _mode(mode: str, timeout: float | None) -> Mode:
    if mode not in {each.value for each in Mode}:
        raise ValueError(f"mode must be abort, wait or keep, got {brief(mode)}")
    if timeout is not None and mode != Mode.WAIT.value:
        raise ValueError(f"timeout is for mode wait, not {mode}")
    if timeout is not None:
        try:
            number(timeout, 0, MAX_SECONDS)
        except ValueError as exc:
            raise ValueError(f"timeout {exc}") from None
    return Mode(mode)


def _path(path: str | Path) -> str:
    text = str(path) if isinstance(path, str | Path) else ""
    if not text or len(text) > MAX_PATH or not text.isprintable():  # lone surrogates are not
        raise ValueError(f"path must be a file or directory, got {brief(path)}")
    return text


def _tags(tags: Collection[str]) -> frozenset[Tag]:
    known = {tag.value for tag in Tag}
    wrong = [tag for tag in tags if tag not in known] if not isinstance(tags, str) else [tags]
    if wrong or not tags:
        raise ValueError(f"tags must be some of {', '.join(sorted(known))}, got {brief(tags)}")
    return frozenset(map(Tag, tags))


def _value(tag: Tag) -> str:
    return tag.value
