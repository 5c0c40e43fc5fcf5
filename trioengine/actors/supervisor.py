"""The supervisor: starts a worker, watches over it, learns its death, settles its requests, starts the next one.

It is a service: it outlives the sessions, so that their last messages are written, and one deadline bounds the whole
shutdown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from trioengine.actors.gate import Gate
from trioengine.actors.incarnation import Dispatch, Incarnation
from trioengine.actors.observer import Observer
from trioengine.actors.ports import Ports
from trioengine.core.config import EngineConfig, WorkerConfig
from trioengine.core.errors import EngineError, ModelError, WorkerLost
from trioengine.core.power import DesiredWorker

logger = logging.getLogger("trioengine")
LOSS_FIELDS = ("worker_pid", "requests_resumed", "requests_failed", "deaths", "max_restarts")  # of its log record


class Settlement(NamedTuple):
    """The consequences of a worker's death."""

    counts_against_worker: bool  # and not against a request
    num_resumed: int  # requests that go on with the next worker
    num_failed: int  # requests


class Supervisor:
    """Keeps one incarnation running until the shutdown."""

    def __init__(
        self,
        config: EngineConfig,
        ports: Ports,
        gate: Gate,
        *,
        desired: Callable[[], DesiredWorker],
        worker_config: Callable[[], WorkerConfig],
        dispatch: Dispatch,
        on_lost: Callable[[EngineError], Settlement],
        observers: Sequence[Observer],
    ) -> None:
        """`on_lost` settles or suspends everything in flight, in one step; `dispatch` handles a worker's messages."""
        self.incarnations = 0
        self.restarts = 0  # of these, in place of one that was lost
        self.retired = 0
        self.current: Incarnation | None = None
        self.spawned = trio.Event()  # the first worker
        self.last_loss: EngineError | None = None
        self._config = config
        self._ports = ports
        self._gate = gate
        self._desired = desired
        self._worker_config = worker_config
        self._dispatch = dispatch
        self._on_lost = on_lost
        self._observers = observers
        self.deaths = 0  # in a row, of workers that delivered no token; the dispatcher of tokens sets it to 0
        self._shutdown = trio.Event()
        self._scope = trio.CancelScope(shield=True)

    def shut_down(self) -> None:
        """Begin the shutdown; harmless when begun. From now on `worker_shutdown_timeout` bounds `run`."""
        if not self._shutdown.is_set():
            self._shutdown.set()
            if self.current is not None:
                self.current.end()
            self._gate.notify()
            self._scope.deadline = trio.current_time() + self._config.worker_shutdown_timeout

    def retire(self) -> None:
        """Let the worker exit, which holds no session and is posted nothing more; if one is wanted, it follows soon."""
        for observer in self._observers:
            observer.worker_retired()
        if self.current is not None:
            self.current.is_retiring = True
            self.current.end()

    @property
    def is_alive(self) -> bool:
        """Whether nothing is known of the current worker's death, not even by its process."""
        return self.current is None or self.current.process.is_alive

    @property
    def is_retiring(self) -> bool:
        """Whether a worker that is to retire is still there."""
        return self.current is not None and self.current.is_retiring

    async def run(self) -> None:
        """Service: raises ModelError or WorkerLost when no worker can be had."""
        with self._scope:
            lost = False
            while not self._shutdown.is_set():
                self.incarnations += 1
                self.restarts += lost
                retired = False
                try:
                    retired = await self._run_incarnation()
                except WorkerLost as exc:
                    if self.incarnations == 1:
                        raise
                    self._log_loss(exc, self._on_worker_lost(exc), None)
                lost = not retired
                if self._desired().should_run and not (retired or self._shutdown.is_set()):
                    await self._back_off()
                while not (self._desired().should_run or self._shutdown.is_set()):
                    await self._gate.changed()

    def _on_worker_lost(self, error: EngineError) -> Settlement:
        self.last_loss = error
        settlement = self._on_lost(error)
        counts = settlement.counts_against_worker and self._desired().is_indispensable
        self.deaths += counts
        return settlement._replace(counts_against_worker=counts)

    def _log_loss(self, error: EngineError, settlement: Settlement, pid: int | None) -> None:
        """`pid` is None of a worker that could not be started."""
        process = "" if pid is None else f" (pid {pid})"
        if self._gives_up:  # no worker will come for those that would go on
            settlement = settlement._replace(num_resumed=0, num_failed=settlement.num_failed + settlement.num_resumed)
        counts = settlement.num_resumed, settlement.num_failed
        fields = dict(zip(LOSS_FIELDS, (pid, *counts, self.deaths, self._config.max_restarts), strict=True))
        line = "%s%s; requests that go on: %d, that fail: %d; %s"
        logger.warning(line, error, process, *counts, self._next_step(settlement), extra=fields)

    @property
    def _gives_up(self) -> bool:
        """Whether too many workers have died in a row for another one to be started."""
        return self._desired().should_run and self.deaths >= self._config.max_restarts

    def _next_step(self, settlement: Settlement) -> str:
        if not self._desired().should_run:
            return "the next worker starts when it is needed"
        if self._gives_up:
            return f"giving up after {self.deaths} deaths in a row"
        if not settlement.counts_against_worker:
            return "starting the next worker"
        return f"starting the next worker (death {self.deaths} of at most {self._config.max_restarts} in a row)"

    async def _run_incarnation(self) -> bool:
        """Whether the worker is to retire."""
        process = await self._ports.spawn_worker()
        self.spawned.set()
        incarnation = self.current = Incarnation(self._config, process, self._dispatch)
        if self._shutdown.is_set():
            incarnation.end()
        try:
            await incarnation.run(self._worker_config())
        finally:
            self.current = None
            error = incarnation.loss(process.reap())
            self.retired += incarnation.is_retiring
            if incarnation.has_lived:
                self.deaths = 0
            settlement = self._on_worker_lost(error)
            incarnation.link.lose()  # not before: requests that go on need its payloads
        if incarnation.is_retiring or self._shutdown.is_set():
            return incarnation.is_retiring
        is_first = self.incarnations == 1 and not incarnation.ready
        if is_first or (isinstance(error, ModelError) and self._desired().is_indispensable):
            raise error
        self._log_loss(error, settlement, process.pid)
        return False

    async def _back_off(self) -> None:
        if self.deaths >= self._config.max_restarts:
            last = self.last_loss
            raise WorkerLost(f"the worker died {self.deaths} times without delivering a token; {last}") from last
        delays = self._config.restart_delays
        delay = delays[min(max(self.deaths - 1, 0), len(delays) - 1)]
        self._gate.retry_after = delay + 1.0
        with trio.move_on_after(delay):
            await self._shutdown.wait()
