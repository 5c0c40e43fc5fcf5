"""Tasks that read the states of an engine: one reads each at once, the others late and a few at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.power_change import PowerState, StateSubscription
from trioengine.core.lifecycle import Power
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.callers import Call
from trioengine.testing.fuzz.faults import InjectedFaults, Life
from trioengine.testing.sim_loop import SimLoop

MAX_UNREAD = 2  # states that a StateReader's subscription keeps, so that programs come to the limit
MOST_READERS = 3


@dataclass(eq=False)
class StateLog:
    """A task that reads every state at once; the readers are compared with it."""

    engine: Engine
    states: list[PowerState] = field(default_factory=list)
    subscription: StateSubscription | None = None

    @property
    def num_published(self) -> int:
        """The states that there were, also those that were published in this step."""
        return len(self.states) + (0 if self.subscription is None else inside.num_unread(self.subscription))

    async def run(self) -> None:
        with self.engine.states() as self.subscription:
            async for state in self.subscription:
                assert not self.states or state != self.states[-1], f"it is {state}, and is published twice"
                self.states.append(state)


@dataclass(eq=False)
class StateReader:
    """A task that reads no more states than it was allowed to, and keeps its subscription meanwhile.

    With `tries`, every other read is cancelled.
    """

    log: StateLog
    tries: bool
    found: list[tuple[int, PowerState]] = field(default_factory=list)  # with their numbers in the log
    next: int = 0  # in the log
    allowed: int = 0  # reads that are left
    num_reads: int = 0
    num_missed: int = 0
    has_ended: bool = False
    over: bool = False
    go_on: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def allow(self, count: int) -> None:
        """Let it read so many states more."""
        self.allowed += count
        self.go_on.set()

    async def run(self) -> None:
        try:
            with self.scope, inside.subscription(self.log.engine, MAX_UNREAD) as states:
                self.next = self.log.num_published - 1  # the present state
                await self._read(states)
        finally:
            self.over = True

    async def _read(self, states: StateSubscription) -> None:
        while True:
            while not self.allowed:
                self.go_on = trio.Event()
                await self.go_on.wait()
            self.num_reads += 1
            with trio.CancelScope() as scope:
                if self.tries and self.num_reads % 2:
                    scope.cancel()
                state = await anext(states, None)
                if state is None:
                    self.has_ended = True
                    return
                self._take(state)

    def _take(self, state: PowerState) -> None:
        oldest = max(self.next, self.log.num_published - MAX_UNREAD)
        self.num_missed += oldest - self.next
        self.found.append((oldest, state))
        self.next = oldest + 1
        self.allowed -= 1

    def check(self, *, is_engine_over: bool) -> None:
        """At rest: it has got the states that were published, and as many as it wanted."""
        states = self.log.states
        for number, state in self.found:
            assert number < len(states) and state == states[number], f"read was {state}, published {states[number:]}"
        if self.scope.cancel_called:
            assert self.over, "a reader of the states was cancelled, and goes on"
        elif self.has_ended:
            assert self.found and states[-1].power is Power.CLOSED, f"the states end with {states[-1]}"
            assert self.next == len(states), f"the states end, and {states[self.next :]} were not read"
        elif self.allowed:
            assert self.next == len(states), f"a reader of the states waits, and there are {states[self.next :]}"
            assert not is_engine_over, "the engine is over, and its states go on"


class StateReaders:
    """All tasks that read the states of one engine: the log, from the beginning on, and the readers that are added."""

    def __init__(self, engine: Engine, faults: InjectedFaults, loop: SimLoop) -> None:
        self._loop = loop
        self._log = StateLog(engine)
        self._reading = Call(Life(faults), "states", self._log.run, ())
        loop.start_soon(self._reading.run, name="states")
        self.readers: list[StateReader] = []

    @property
    def may_add(self) -> bool:
        """Whether there is a state to begin with, and room for a reader."""
        return bool(self._log.states) and len(self.readers) < MOST_READERS

    def add(self, count: int, *, tries: bool) -> None:
        """Start a reader of so many states."""
        reader = StateReader(self._log, tries)
        reader.allow(count)
        self.readers.append(reader)
        self._loop.start_soon(reader.run, name=f"states-{len(self.readers)}")

    def check(self, *, is_engine_over: bool) -> None:
        """At rest: each reader has got its states, and the last one is the state of the engine."""
        assert self._reading.over >= is_engine_over, "the engine is over, and its states go on"
        for reader in self.readers:
            reader.check(is_engine_over=is_engine_over)
        latest, power = self._log.states[-1], self._log.engine.power
        assert latest == power, f"published was {latest}, and the engine is {power}"

    @property
    def have_missed(self) -> bool:
        """Whether one was so slow that it has missed states."""
        return any(reader.num_missed for reader in self.readers)

    def cancel(self) -> None:
        for reader in self._all:
            reader.scope.cancel()

    @property
    def are_over(self) -> bool:
        return all(reader.over for reader in self._all)

    @property
    def _all(self) -> list[Call | StateReader]:
        return [self._reading, *self.readers]
