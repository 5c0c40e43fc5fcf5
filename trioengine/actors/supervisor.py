"""The supervisor: starts a worker, watches over it, learns its death, settles what was in flight, starts the next one.

It is a service: it outlives the sessions, so that what they posted last is written, and one deadline bounds the whole
shutdown.
"""

from __future__ import annotations

import logging
import math
import signal
from typing import TYPE_CHECKING

import trio

from trioengine.actors.link import Link
from trioengine.actors.ports import WorkerProcess
from trioengine.core.config import WorkerConfig
from trioengine.core.errors import EngineError, ModelError, RemoteProtocolError, WorkerLost
from trioengine.core.messages import (
    Activity,
    Configure,
    Fatal,
    FatalCode,
    Loading,
    Message,
    PayloadConsumed,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Slept,
    Updated,
    Woken,
)

if TYPE_CHECKING:
    from trioengine.actors.engine_state import EngineState, Settlement

logger = logging.getLogger("trioengine")
LOSS_FIELDS = ("worker_pid", "requests_resumed", "requests_failed", "deaths", "max_restarts")  # of its log record
LAST_FRAMES_TIMEOUT = 0.2  # seconds, from the worker's death
TERMINATE_TIMEOUT = 1.0  # seconds from SIGTERM to SIGKILL, within the shutdown's deadline
FORGET_AFTER = 300.0  # seconds of an incarnation's life, after which the deaths before it do not count
KILL_TIMEOUT = 1.0  # seconds from SIGKILL to giving it up, beyond that deadline; the kernel may delay a death


class Incarnation:
    """One worker process, from its start to its end."""

    def __init__(self, engine: EngineState, process: WorkerProcess) -> None:
        self.link = Link(process)
        self.process = process
        self.ready_at = math.inf  # on trio's clock
        self.reason: str | None = None  # why we killed it
        self.fatal: Fatal | None = None  # what it said last
        self.is_retiring = False
        self._engine = engine
        self._config = engine.config
        self._last_progress = trio.current_time()
        self._progress = 0  # as its last PONG said
        self._is_loading = True
        self._pong: trio.Event | None = None  # set: the PING was answered
        self._pinged = math.inf  # when the PING was posted that is not answered
        self._end_of_stream = trio.Event()
        self._dead = trio.Event()
        self._told_to_end = trio.Event()

    async def run(self, config: WorkerConfig) -> None:
        """Run the process to its death; cancelled, it is killed. What was in flight is the caller's to settle."""
        try:
            self.link.post(Configure(config))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.link.write)
                nursery.start_soon(self._read)
                nursery.start_soon(self._send_payloads)
                nursery.start_soon(self._watch)
                nursery.start_soon(self._shut_down)
                await self.process.wait()
                self._dead.set()
                with trio.move_on_after(LAST_FRAMES_TIMEOUT):
                    await self._end_of_stream.wait()
                nursery.cancel_scope.cancel()
        finally:
            if not self._dead.is_set():
                self.process.kill()
                with trio.move_on_after(KILL_TIMEOUT, shield=True):
                    await self.process.wait()

    @property
    def ready(self) -> bool:
        """Whether it has said READY."""
        return self.ready_at < math.inf

    @property
    def has_lived(self) -> bool:
        """Whether it was READY for `FORGET_AFTER` seconds, and was not killed for hanging or breaking the protocol."""
        return self.reason is None and trio.current_time() - self.ready_at >= FORGET_AFTER

    @property
    def is_responsive(self) -> bool:
        """Whether it has not left a PING unanswered for half the time that is its end."""
        return trio.current_time() - self._pinged < self._config.unresponsive_timeout / 2

    def kill(self, reason: str) -> None:
        """End it; the first reason is the one that is told."""
        if self.reason is None:
            self.reason = reason
            logger.warning("worker %d is killed: %s", self.process.pid, reason)
        self.process.kill()

    def end(self) -> None:
        """Write what is posted, ask it to exit, then tell it to, then kill it; at once where it is not ready yet."""
        self._told_to_end.set()

    async def _shut_down(self) -> None:
        await self._told_to_end.wait()
        if not self.ready:
            self.process.kill()
            return
        self.link.post(Shutdown())
        with trio.move_on_after(self._config.worker_shutdown_timeout / 2):
            await self._dead.wait()
            return
        self.process.terminate()
        with trio.move_on_after(TERMINATE_TIMEOUT):
            await self._dead.wait()
            return
        self.kill("it did not end when told to")

    async def _read(self) -> None:
        try:
            await self.link.read(self._route)
        except RemoteProtocolError as exc:
            self.kill(f"it broke the protocol: {exc}")
        self._end_of_stream.set()
        await self._kill_unless_dead("it closed its pipe")

    async def _send_payloads(self) -> None:
        try:
            await self.link.send_payloads()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._kill_unless_dead("it takes no payloads")

    async def _kill_unless_dead(self, reason: str) -> None:
        """Kill it, unless it is about to die or was told to end."""
        with trio.move_on_after(LAST_FRAMES_TIMEOUT):
            await self._dead.wait()
        if not self._dead.is_set() and not self._told_to_end.is_set():
            self.kill(reason)

    def _route(self, message: Message) -> None:
        match message:
            case Pong():
                self._on_pong(message)
            case Loading():
                self._last_progress = trio.current_time()
                self._engine.on_loading(message)
            case Ready():
                self.ready_at, self._is_loading = trio.current_time(), False
                self._engine.on_ready(message, self.link)
            case Fatal():
                self.fatal = message
            case Slept() | Woken() | Updated():
                self.link.answer(message)
            case PayloadConsumed():
                self.link.on_consumed(message)
            case _:
                self._engine.on_message(message)

    async def _watch(self) -> None:
        """One PING at a time; no answer, no progress while loading, or an endless step is death."""
        count = 0
        while True:
            count += 1
            self._pong, self._pinged = trio.Event(), trio.current_time()
            self.link.post(Ping(count))
            with trio.move_on_after(self._config.unresponsive_timeout):
                await self._pong.wait()
            if not self._pong.is_set():
                self.kill(f"no answer for {self._config.unresponsive_timeout:g} s")
                return
            await trio.sleep(self._config.ping_interval)
            if self._is_loading and trio.current_time() - self._last_progress > self._config.startup_timeout:
                doing = "loaded weights" if self.ready else "started"
                self.kill(f"no progress for {self._config.startup_timeout:g} s while it {doing}")
                return

    def _on_pong(self, message: Pong) -> None:
        if message.activity is Activity.STEPPING and message.seconds > self._config.step_timeout:
            self.kill(f"one step takes longer than {self._config.step_timeout:g} s")
        if self.ready:  # before, LOADING tells
            self._is_loading = message.activity is Activity.LOADING
            if message.progress != self._progress:
                self._progress, self._last_progress = message.progress, trio.current_time()
        self._pinged = math.inf
        if self._pong is not None:
            self._pong.set()


class Supervisor:
    """Keeps one incarnation running until the shutdown."""

    def __init__(self, engine: EngineState) -> None:
        self.incarnations = 0
        self.restarts = 0  # of these, in place of one that was lost
        self.retired = 0
        self.current: Incarnation | None = None
        self.last_loss: EngineError | None = None
        self._engine = engine
        self._config = engine.config
        self._deaths = 0  # in a row, of workers that delivered no token
        self._shutdown = trio.Event()
        self._scope = trio.CancelScope(shield=True)

    def shut_down(self) -> None:
        """Begin the shutdown; harmless when begun. From now on `worker_shutdown_timeout` bounds `run`."""
        if not self._shutdown.is_set():
            self._shutdown.set()
            if self.current is not None:
                self.current.end()
            self._engine.gate.notify()
            self._scope.deadline = trio.current_time() + self._config.worker_shutdown_timeout

    def retire(self) -> None:
        """Let the worker exit, which holds no session and is posted nothing more; if one is wanted, it follows soon."""
        if self.current is not None:
            self.current.is_retiring = True
            self.current.end()

    @property
    def is_alive(self) -> bool:
        """Whether nothing is known of the current worker's death, not even by its process."""
        return self.current is None or self.current.process.is_alive

    @property
    def is_retiring(self) -> bool:
        """Whether a worker that was told to retire is still there."""
        return self.current is not None and self.current.is_retiring

    def reset_deaths(self) -> None:
        """Forget the deaths so far: the worker is worth restarting."""
        self._deaths = 0

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
                if self._engine.needs.is_wanted and not (retired or self._shutdown.is_set()):
                    await self._back_off()
                while not (self._engine.needs.is_wanted or self._shutdown.is_set()):
                    await self._engine.gate.changed()

    def _on_worker_lost(self, error: EngineError) -> Settlement:
        self.last_loss = error
        settlement = self._engine.on_worker_lost(error)
        counts = settlement.counts_against_worker and self._engine.needs.is_indispensable
        self._deaths += counts
        return settlement._replace(counts_against_worker=counts)

    def _log_loss(self, error: EngineError, settlement: Settlement, pid: int | None) -> None:
        """`pid` is None of a worker that could not be started."""
        process = "" if pid is None else f" (pid {pid})"
        if self._gives_up:  # no worker will come for those that would go on
            settlement = settlement._replace(num_resumed=0, num_failed=settlement.num_failed + settlement.num_resumed)
        counts = settlement.num_resumed, settlement.num_failed
        fields = dict(zip(LOSS_FIELDS, (pid, *counts, self._deaths, self._config.max_restarts), strict=True))
        line = "%s%s; requests that go on: %d, that fail: %d; %s"
        logger.warning(line, error, process, *counts, self._next_step(settlement), extra=fields)

    @property
    def _gives_up(self) -> bool:
        """Whether too many workers have died in a row for another one to be started."""
        return self._engine.needs.is_wanted and self._deaths >= self._config.max_restarts

    def _next_step(self, settlement: Settlement) -> str:
        if not self._engine.needs.is_wanted:
            return "the next worker starts when it is needed"
        if self._gives_up:
            return f"giving up after {self._deaths} deaths in a row"
        if not settlement.counts_against_worker:
            return "starting the next worker"
        return f"starting the next worker (death {self._deaths} of at most {self._config.max_restarts} in a row)"

    async def _run_incarnation(self) -> bool:
        """Whether the worker was told to retire."""
        process = await self._engine.ports.spawn_worker()
        incarnation = self.current = Incarnation(self._engine, process)
        if self._shutdown.is_set():
            incarnation.end()
        try:
            await incarnation.run(self._engine.worker_config())
        finally:
            self.current = None
            error = _loss(incarnation, process.reap())
            self.retired += incarnation.is_retiring
            if incarnation.has_lived:
                self._deaths = 0
            settlement = self._on_worker_lost(error)
            incarnation.link.lose()  # not before: its payloads are those of the requests that go on
        if incarnation.is_retiring or self._shutdown.is_set():
            return incarnation.is_retiring
        is_first = self.incarnations == 1 and not incarnation.ready
        if is_first or (isinstance(error, ModelError) and self._engine.needs.is_indispensable):
            raise error
        self._log_loss(error, settlement, process.pid)
        return False

    async def _back_off(self) -> None:
        if self._deaths >= self._config.max_restarts:
            last = self.last_loss
            raise WorkerLost(f"the worker died {self._deaths} times without delivering a token; {last}") from last
        delays = self._config.restart_delays
        delay = delays[min(max(self._deaths - 1, 0), len(delays) - 1)]
        self._engine.gate.retry_after = delay + 1.0
        with trio.move_on_after(delay):
            await self._shutdown.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def _loss(incarnation: Incarnation, exit_code: int | None) -> EngineError:
    """Why the incarnation is gone: from inside it where it said so."""
    fatal = incarnation.fatal
    if fatal is not None and fatal.code is FatalCode.MODEL:
        return ModelError(fatal.message)
    if fatal is not None:
        reason = fatal.message
    elif incarnation.reason is not None:
        reason = f"it was killed: {incarnation.reason}"
    elif exit_code is None:
        reason = "it was killed, and is not dead yet"
    elif exit_code < 0:
        reason = f"killed by {_signal_name(-exit_code)}"
    else:
        reason = f"exit status {exit_code}"
    traceback = fatal.traceback if fatal is not None else None
    return WorkerLost(f"the worker was lost: {reason}", exit_code=exit_code, traceback=traceback)
