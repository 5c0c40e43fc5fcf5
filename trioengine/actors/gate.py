"""The gate: what is admitted, and when. It owns the engine's state, the books and the ids.

Admission is synchronous: check, count, mint, in one step. Who asked with `wait=True` waits here, without holding
anything, and asks again when a slot is given back or the engine changes its state.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trioengine.actors.link import Link
from trioengine.core.config import EngineConfig
from trioengine.core.errors import EngineClosed, EngineError, EngineOverloaded
from trioengine.core.ledger import Ledger
from trioengine.core.lifecycle import Power, PowerEvent, next_power


class Gate:
    """Admits sessions and requests while the engine is awake and within its limits."""

    def __init__(self, config: EngineConfig) -> None:
        self.power = Power.LOADING
        self.ledger = Ledger()
        self.retry_after = 1.0  # seconds; what a refused caller is told while the worker restarts
        self.failure: Exception | None = None  # why the engine closed by itself
        self.link: Link | None = None  # to the incarnation that is READY
        self._config = config
        self._changed = trio.Event()
        self._last_id = 0

    def mint(self) -> int:
        """A new id, never used before."""
        self._last_id += 1
        return self._last_id

    def change_power(self, event: PowerEvent) -> None:
        self.power = next_power(self.power, event)
        self.notify()

    def notify(self) -> None:
        """Something changed that a waiting caller may have waited for."""
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def admit_session(self) -> int:
        """Take a session slot and return the session's id. Raises EngineClosed or EngineOverloaded."""
        self._check_open()
        if self.power is Power.LOADING:
            raise self._not_awake()
        if self.ledger.sessions >= self._config.max_sessions:
            raise EngineOverloaded(f"all {self._config.max_sessions} sessions are taken", code="sessions")
        self.ledger.open_session()
        return self.mint()

    def free_session(self) -> None:
        """Give a session slot back."""
        self.ledger.free_session()
        self.notify()

    def admit_request(self) -> int:
        """Take a request slot and return the request's id. Raises EngineClosed or EngineOverloaded."""
        self._check_open()
        if self.power is not Power.AWAKE:
            raise self._not_awake()
        slots = self._config.max_num_seqs + self._config.max_num_queued_reqs
        if self.ledger.in_flight >= slots:
            raise EngineOverloaded(f"all {slots} request slots are taken", code="queue")
        self.ledger.receive()
        return self.mint()

    async def admit(self, admission: Callable[[], int], *, wait: bool, deadline: float = float("inf")) -> int:
        """Call `admission`; with `wait`, again after each change until the deadline, then raise what it raised last.

        Cancelled, nothing is taken.
        """
        while True:
            try:
                return admission()
            except EngineOverloaded:
                if not wait or trio.current_time() >= deadline:
                    self.ledger.reject()
                    raise
            except EngineError:
                self.ledger.reject()
                raise
            with trio.move_on_at(deadline):
                await self.changed()

    def committing_link(self) -> Link:
        """The link for a request that was admitted: a draining engine still runs it. Raises as `admit_request`."""
        if self.power is Power.CLOSED:
            self._check_open()
        if self.link is None:
            raise self._not_awake()
        return self.link

    def _not_awake(self) -> EngineOverloaded:
        return EngineOverloaded(
            f"the engine is {self.power.value}", code=self.power.value, retry_after=self.retry_after
        )

    def _check_open(self) -> None:
        if self.power in (Power.DRAINING, Power.CLOSED):
            raise EngineClosed(f"the engine is {self.power.value}") from self.failure
