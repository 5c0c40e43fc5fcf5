"""The gate admits sessions and requests. It owns the engine's stage, the queue of changes, the ledger and the ids.

It is open while the engine is AWAKE and no sleep or update is pending, which begins in the step of the request for it.

Admission is synchronous: check, count, mint, in one step. A caller that finds no slot waits here, unless it asked with
`wait=False`, without holding anything, in a line for each kind of slot. Through a restart, a sleep or an update only a
caller with `wait=True` waits; others are refused, those in the line too. A slot that is given back is handed to the
first of its line in the same step; so no slot is free while a caller waits, and a newcomer, who finds none, cannot
overtake: it lines up behind the others, or is refused with EngineOverloaded or EngineAsleep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import trio

from trioengine.actors.effects import Effects
from trioengine.actors.link import Link
from trioengine.actors.observer import Observer, Slot
from trioengine.actors.power_change import PowerChange
from trioengine.actors.waiting_line import NOT_NOW, WaitingLine, waits_for
from trioengine.aio.concurrency import NEVER, Deadline, Notifier
from trioengine.core.checks import rejected
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineAsleep, EngineClosed, EngineError, EngineOverloaded, InvariantError
from trioengine.core.ledger import Ledger
from trioengine.core.lifecycle import Power, PowerEvent, PowerStage, next_stage


class PowerChanged:
    """Effect: the engine's stage or its queue of changes has changed."""


class Gate:
    """Admits sessions and requests while the engine is awake and within its limits.

    Every method that may let a caller in line go on adds an effect for it, or serves the line, and drains the effects.
    """

    def __init__(self, config: EngineConfig, effects: Effects, observers: Sequence[Observer] = ()) -> None:
        self.stage = PowerStage.LOADING
        self.changes: deque[PowerChange] = deque()  # requested and not done; the power actor makes the first one
        self.ledger = Ledger()
        self.retry_after = 1.0  # seconds, for a caller that is refused while the worker restarts
        self.failure: Exception | None = None  # why the engine closed by itself
        self.link: Link | None = None  # to the incarnation that is READY
        self.sessions = WaitingLine(observers)  # for a session slot
        self.requests = WaitingLine(observers)  # for a request slot
        self.commits = WaitingLine(observers)  # with a request slot, for a worker
        self._config = config
        running, queued = config.max_num_seqs, config.max_num_queued_reqs
        # the number of slots, and the settings that it comes from
        self._request_slots = (running + queued, f"max_num_seqs {running} + max_num_queued_reqs {queued}")
        self._effects = effects
        self._observers = observers
        self._changes = Notifier()
        self._last_id = 0
        self._num_claimed = 0  # slots of each kind

    def mint(self) -> int:
        """A new id, never used before."""
        self._last_id += 1
        return self._last_id

    # ---- changes --------------------------------------------------------------------------------------------------

    @property
    def power(self) -> Power:
        """The engine's state as users see it."""
        return self.stage.power

    @property
    def is_change_pending(self) -> bool:
        """Whether a sleep or an update is requested and not done."""
        return any(change.blocks_admission for change in self.changes)

    @property
    def is_awake(self) -> bool:
        """Whether requests are admitted, where there is a slot."""
        return self.stage is PowerStage.AWAKE and not self.is_change_pending

    @property
    def is_ending(self) -> bool:
        """Whether the engine drains or is closed."""
        return self.stage in (PowerStage.DRAINING, PowerStage.CLOSED)

    @property
    def num_waiting_for_slot(self) -> int:
        """How many callers wait for a slot, of a session or of a request."""
        return len(self.sessions) + len(self.requests)

    def change_power(self, event: PowerEvent) -> None:
        """Take the transition of the power table."""
        before, self.stage = self.stage, next_stage(self.stage, event)
        for observer in self._observers:
            observer.power_moved(before, event)
        self._power_changed()

    def begin_change(self, change: PowerChange) -> None:
        """Queue a change; a sleep or an update refuses the callers in a line that do not wait for its end."""
        self.changes.append(change)
        self._power_changed()

    def end_change(self, change: PowerChange) -> None:
        """Take a change that is done, or has failed, out of the queue."""
        self.changes.remove(change)
        self._power_changed()

    def _power_changed(self) -> None:
        self._effects.append(PowerChanged())
        self._effects.drain()

    def serve(self) -> None:
        """Let the callers in line go on, or refuse them, as the engine's state has become."""
        for line in (self.commits, self.sessions, self.requests):
            line.serve()
        self.notify()

    def free_session(self) -> None:
        """Give a session slot back."""
        self.ledger.free_session()
        self.sessions.serve()
        self.notify()

    def serve_requests(self) -> None:
        """A request slot is free."""
        self.requests.serve()
        self.notify()

    def notify(self) -> None:
        """Wake the tasks that wait in `changed`."""
        self._changes.notify()

    async def changed(self) -> None:
        """Wait until a slot is given back, a session is detached, or the power changes."""
        await self._changes.wait()

    # ---- admission ------------------------------------------------------------------------------------------------

    async def admit(
        self, line: WaitingLine, admission: Callable[[], object], *, wait: bool | None, deadline: Deadline = NEVER
    ) -> None:
        """Call `admission`; where it is refused for the moment and `wait` allows, when its turn in `line` has come.

        Raises TimedOut when the deadline passes before. Cancelled, nothing is taken. The caller counts a refusal.
        """
        try:
            admission()
            return
        except NOT_NOW as exc:
            if not waits_for(exc, wait):
                raise
        with trio.move_on_at(deadline.at):
            await line.wait(admission, wait=wait)
            return
        try:
            admission()  # too late: raises the reason as it is now
        except NOT_NOW as exc:
            raise deadline.passed(f"while waiting: {exc}") from exc

    def admit_session(self) -> int:
        """Take a session slot and return the session's id. Raises EngineClosed, EngineAsleep or EngineOverloaded."""
        return self._take(Slot.SESSION, self._check_session_slot, self.ledger.open_session)

    def admit_request(self) -> int:
        """Take a request slot and return the request's id. Raises EngineClosed, EngineAsleep or EngineOverloaded."""
        return self._take(Slot.REQUEST, self._check_request_slot, self.ledger.receive)

    @contextmanager
    def claiming(self, count: int) -> Iterator[Callable[[], None]]:
        """Claim slots for so many sessions with a request each, all or none; others do not get them within the block.

        Call the function that this yields in the step that takes a session's slot and its request's: it gives up the
        claim to these. Raises as `admit_session` and `admit_request`, and RequestRejected for more than there ever are;
        counts the refusal.
        """
        try:
            self._check_capacity(count)
            self._check(Slot.SESSION, partial(self._check_session_slot, count))
            self._check(Slot.REQUEST, partial(self._check_request_slot, count))
        except EngineError:
            self.ledger.reject()
            raise
        left = count

        def give_up(number: int = 1) -> None:
            nonlocal left
            left -= number
            self._num_claimed -= number

        self._num_claimed += count
        try:
            yield give_up
        finally:
            if left:
                give_up(left)
                self.serve()

    def _take(self, slot: Slot, check: Callable[[], None], book: Callable[[], None]) -> int:
        self._check(slot, check)
        book()
        id = self.mint()
        for observer in self._observers:
            observer.slot_taken(slot, id)
        return id

    def committing_link(self, *, is_quarantined: bool) -> Link:
        """Return the link for a request that was admitted. Raises as `admit_request`, but lets requests finish.

        `is_quarantined`: the suspects of a worker's death run alone, and other requests wait.
        """
        if self.stage is PowerStage.CLOSED:
            self._check_open()
        if self.link is None or is_quarantined or not self.stage.runs_requests:
            raise self._not_awake()
        return self.link

    def _check(self, slot: Slot, check: Callable[[], None]) -> None:
        try:
            check()
        except EngineError as exc:
            for observer in self._observers:
                observer.slot_refused(slot, exc)
            raise

    def check(self) -> None:
        """Raise InvariantError unless the books balance, and no caller waits for a slot that is free."""
        self.ledger.check()
        for line, check_slot in ((self.sessions, self._check_session_slot), (self.requests, self._check_request_slot)):
            try:
                check_slot()
            except NOT_NOW as exc:
                if num_refusable := line.num_refusable(exc):
                    raise InvariantError(f"{num_refusable} callers wait, though they asked not to: {exc}") from exc
                continue
            except EngineClosed:
                pass
            if len(line):
                raise InvariantError(f"{len(line)} callers wait, though the first of them need not")

    def _check_session_slot(self, count: int = 1) -> None:
        self._check_open()
        if self.power not in (Power.AWAKE, Power.RESTARTING) or self.is_change_pending:
            raise self._not_awake()
        most, num_taken = self._config.max_sessions, self.ledger.sessions + self._num_claimed
        if num_taken + count > most:
            message = f"{_shortage(count, most, num_taken, 'sessions')} (max_sessions)"
            raise EngineOverloaded(message, code="sessions", is_full=True)

    def _check_request_slot(self, count: int = 1) -> None:
        self._check_open()
        if not self.is_awake:
            raise self._not_awake()
        most, settings = self._request_slots
        num_taken = self.ledger.in_flight + self._num_claimed
        if num_taken + count > most:
            message = f"{_shortage(count, most, num_taken, 'request slots')} ({settings})"
            raise EngineOverloaded(message, code="queue", is_full=True)

    def _check_capacity(self, count: int) -> None:
        """Raise RequestRejected for more choices at a time than the engine has slots: to wait would be in vain."""
        most, settings = min(self._request_slots, (self._config.max_sessions, "max_sessions"))
        if count > most:
            raise rejected("n", f"must be at most {most} ({settings}), got {count}")

    def _not_awake(self) -> EngineError:
        if self.power in (Power.LOADING, Power.RESTARTING, Power.DRAINING) and not self.is_change_pending:
            message = f"the engine is {self.power.value}"
            return EngineOverloaded(message, code=self.power.value, retry_after=self.retry_after)
        is_about_to = self.power in (Power.AWAKE, Power.RESTARTING)
        state = "about to sleep or to be updated" if is_about_to else self.power.value.replace("_", " ")
        remedy = "; 'trioengine wake' or Engine.wake wakes it" if self.power is Power.ASLEEP else ""
        return EngineAsleep(f"the engine is {state}{remedy}")

    def _check_open(self) -> None:
        if self.is_ending:
            raise EngineClosed(f"the engine is {self.power.value}") from self.failure


def _shortage(count: int, most: int, num_taken: int, noun: str) -> str:
    if count == 1:
        return f"all {most} {noun} are taken"
    return f"n: {count} choices need {count} {noun}; of {most}, {most - num_taken} are free"
