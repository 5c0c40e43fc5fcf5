"""One worker process, from its start to its end: it is fed, read, watched and, where it must be, killed."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import trio

from trioengine.actors.link import Link
from trioengine.actors.ports import WorkerProcess
from trioengine.core.config import EngineConfig, WorkerConfig
from trioengine.core.errors import EngineError, ModelError, WorkerLost
from trioengine.core.messages import Activity, Configure, Fatal, FatalCode, Message, Ping, Pong, Shutdown

logger = logging.getLogger("trioengine")
LAST_FRAMES_TIMEOUT = 0.2  # seconds, from the worker's death
TERMINATE_TIMEOUT = 1.0  # seconds from SIGTERM to SIGKILL, within the shutdown's deadline
FORGET_AFTER = 300.0  # seconds of an incarnation's life, after which the deaths before it do not count
STANDSTILL = 1.0  # seconds by which a timeout is noticed late: the process was stopped, so the worker was not heard
Dispatch: TypeAlias = Callable[["Incarnation", Message], None]
KILL_TIMEOUT = 1.0  # seconds from SIGKILL to giving it up, beyond that deadline; the kernel may delay a death


class Incarnation:
    """A worker process, and the link to it."""

    def __init__(self, config: EngineConfig, process: WorkerProcess, dispatch: Dispatch) -> None:
        """`dispatch` handles every message of the worker; it hands those about the process back, to `on_pong` etc."""
        self.link = Link(process)
        self.process = process
        self.ready_at = math.inf  # on trio's clock
        self.reason: str | None = None  # why we killed it
        self.fatal: Fatal | None = None  # its last message, if it is that
        self.is_retiring = False
        self._config = config
        self._dispatch = dispatch
        self._last_progress = trio.current_time()
        self._progress = 0  # as in its last PONG
        self._is_loading = True
        self._pong: trio.Event | None = None  # set: the PING was answered
        self._pinged = math.inf  # when the PING was posted that is not answered
        self._dead = trio.Event()
        self._told_to_end = trio.Event()

    async def run(self, config: WorkerConfig) -> None:
        """Run the process to its death; cancelled, it is killed. The caller settles the requests in flight."""
        try:
            self.link.post(Configure(config))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.link.write)
                nursery.start_soon(self.link.read, partial(self._dispatch, self))
                nursery.start_soon(self._follow_stream)
                nursery.start_soon(self._send_payloads)
                nursery.start_soon(self._watch)
                nursery.start_soon(self._shut_down)
                await self.process.wait()
                self._dead.set()
                with trio.move_on_after(LAST_FRAMES_TIMEOUT):
                    await self.link.end_of_stream.wait()
                self._check_protocol()
                nursery.cancel_scope.cancel()
        finally:
            if not self._dead.is_set():
                self.process.kill()
                with trio.move_on_after(KILL_TIMEOUT, shield=True):
                    await self.process.wait()

    @property
    def ready(self) -> bool:
        """Whether it has sent READY."""
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
        """End it; the first reason counts."""
        if self.reason is None:
            self.reason = reason
            logger.warning("worker %d is killed: %s", self.process.pid, reason)
        self.process.kill()

    def end(self) -> None:
        """Write the posted messages, send SHUTDOWN, then SIGTERM, then SIGKILL; SIGKILL at once if it is not ready."""
        self._told_to_end.set()

    def loss(self, exit_code: int | None) -> EngineError:
        """The reason why it is gone, as the worker gave it where it could. `exit_code` is None while it is not dead."""
        fatal = self.fatal
        if fatal is not None and fatal.code is FatalCode.MODEL:
            return ModelError(fatal.message)
        if fatal is not None:
            reason = fatal.message
        elif self.reason is not None:
            reason = f"it was killed: {self.reason}"
        elif exit_code is None:
            reason = "it was killed, and is not dead yet"
        elif exit_code < 0:
            reason = f"killed by {_signal_name(-exit_code)}"
        else:
            reason = f"exit status {exit_code}"
        traceback = fatal.traceback if fatal is not None else None
        return WorkerLost(f"the worker was lost: {reason}", exit_code=exit_code, traceback=traceback)

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
        self.kill("it did not end at SIGTERM")

    async def _follow_stream(self) -> None:
        await self.link.end_of_stream.wait()
        self._check_protocol()
        await self._kill_unless_dead("it closed its pipe")

    def _check_protocol(self) -> None:
        if self.link.violation is not None:
            self.kill(f"it broke the protocol: {self.link.violation}")

    async def _send_payloads(self) -> None:
        try:
            await self.link.send_payloads()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._kill_unless_dead("it takes no payloads")

    async def _kill_unless_dead(self, reason: str) -> None:
        """Kill it, unless it is about to die or `end` was called."""
        with trio.move_on_after(LAST_FRAMES_TIMEOUT):
            await self._dead.wait()
        if not self._dead.is_set() and not self._told_to_end.is_set():
            self.kill(reason)

    def on_loading(self) -> None:
        """LOADING: the worker makes progress."""
        self._last_progress = trio.current_time()

    def on_ready(self) -> None:
        """READY: the worker takes sessions, or sleeps as it was configured."""
        self.ready_at, self._is_loading = trio.current_time(), False

    def on_fatal(self, message: Fatal) -> None:
        """FATAL: the worker's last message."""
        self.fatal = message

    async def _watch(self) -> None:
        """One PING at a time; no answer, no progress while loading, or an endless step is death."""
        count = 0
        while True:
            count += 1
            self._pong, self._pinged = trio.Event(), trio.current_time()
            self.link.post(Ping(count))
            if not await self._is_answered(self._pong):
                self.kill(f"no answer for {self._config.unresponsive_timeout:g} s")
                return
            awake = trio.current_time() + self._config.ping_interval
            await trio.sleep_until(awake)
            if _stood_still_since(awake):
                self._last_progress = trio.current_time()
            if self._is_loading and trio.current_time() - self._last_progress > self._config.startup_timeout:
                doing = "loaded weights" if self.ready else "started"
                self.kill(f"no progress for {self._config.startup_timeout:g} s while it {doing}")
                return

    async def _is_answered(self, pong: trio.Event) -> bool:
        """Wait for an answer; the time in which this process itself was stopped does not count."""
        while True:
            with trio.move_on_after(self._config.unresponsive_timeout) as waiting:
                await pong.wait()
            if not waiting.cancelled_caught or not _stood_still_since(waiting.deadline):
                return pong.is_set()
            self._pinged = trio.current_time()

    def on_pong(self, message: Pong) -> None:
        """PONG: the reply to the last PING, with the worker's activity."""
        if message.activity is Activity.STEPPING and message.seconds > self._config.step_timeout:
            self.kill(f"one step takes longer than {self._config.step_timeout:g} s")
        if self.ready:  # before that, LOADING has the progress
            self._is_loading = message.activity is Activity.LOADING
            if message.progress != self._progress:
                self._progress, self._last_progress = message.progress, trio.current_time()
        self._pinged = math.inf
        if self._pong is not None:
            self._pong.set()


def _stood_still_since(deadline: float) -> bool:
    """Return whether a task woke so late that this process must have been stopped; log it."""
    late = trio.current_time() - deadline
    if late >= STANDSTILL:
        logger.warning("the engine stood still for %.0f s", late)
    return late >= STANDSTILL


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
