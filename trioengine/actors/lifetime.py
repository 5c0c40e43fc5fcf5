"""The life of an engine: its nurseries, from the search for the model to the end; and the ways to that end."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import trio

from trioengine.actors.power_change import Weights
from trioengine.actors.runtime import Runtime
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.core.errors import EngineClosed, EngineError
from trioengine.core.lifecycle import PowerEvent
from trioengine.core.types import Cause


class Lifetime:
    """Runs the tasks of one engine, and ends them."""

    def __init__(self, runtime: Runtime, on_progress: Callable[[int, int], None] | None) -> None:
        self._runtime = runtime
        self._on_progress = on_progress  # of a download
        self._closing = trio.Event()
        self._finding = trio.CancelScope()  # the model, which may take a download

    async def run(self) -> None:
        """Run until `close`, or until cancelled; raises as `Engine.run`."""
        runtime = self._runtime
        try:
            with self._finding:
                path = await runtime.read_models(self._on_progress)
            if self._closing.is_set():
                return
            async with open_unwrapped_nursery() as services:
                runtime.power.weights = Weights(str(path), 1)
                services.start_soon(self._supervise)
                try:
                    await self._run_sessions()
                finally:
                    try:
                        runtime.sessions.end_all(Cause.SHUTDOWN)
                    finally:  # in any case: the supervisor is shielded
                        runtime.supervisor.shut_down()
        except Exception as exc:
            runtime.gate.failure = exc
            raise
        finally:
            runtime.gate.change_power(PowerEvent.CLOSE)

    async def _run_sessions(self) -> None:
        runtime = self._runtime
        async with trio.open_nursery() as sessions:
            runtime.nursery = sessions
            sessions.start_soon(runtime.power.run)
            try:
                await self._closing.wait()
            finally:  # before the nursery closes: nothing is admitted that could not be adopted
                runtime.gate.change_power(PowerEvent.CLOSE)
            sessions.cancel_scope.cancel()

    async def _supervise(self) -> None:
        try:
            await self._runtime.supervisor.run()
        except EngineError as exc:
            self._runtime.give_up(exc)
            raise

    async def ready(self) -> None:
        """Wait until requests are admitted by a worker that is alive. Raises the reason if that will never be."""
        gate, supervisor = self._runtime.gate, self._runtime.supervisor
        while not (gate.is_awake and supervisor.is_alive):
            if gate.is_ending:
                raise copy(gate.failure or EngineClosed(f"the engine is {gate.power.value}"))
            await gate.changed()

    def close(self) -> None:
        """End the engine; harmless when closed."""
        self._closing.set()
        self._finding.cancel()
        self._runtime.gate.change_power(PowerEvent.CLOSE)

    async def drain(self, seconds: float, abort_rest: Callable[[], object]) -> bool:
        """Admit nothing more, and wait for the requests in flight, for so long; then abort the rest.

        Returns whether nothing was aborted meanwhile. Cancelled, the engine goes on draining.
        """
        runtime = self._runtime
        causes = runtime.gate.ledger.abort_causes
        before = causes[Cause.SHUTDOWN]
        runs_requests, is_changing = runtime.power.desired_worker.runs_requests, runtime.gate.is_change_pending
        runtime.gate.change_power(PowerEvent.DRAIN)
        if not runs_requests:
            runtime.sessions.abort_all(Cause.SHUTDOWN)
        elif is_changing:
            runtime.sessions.abort_suspended(Cause.SHUTDOWN)
        with trio.move_on_after(seconds):
            await self._quiet()
            return causes[Cause.SHUTDOWN] == before
        abort_rest()
        with trio.move_on_after(runtime.config.worker_shutdown_timeout):
            await self._quiet()
        return False

    async def _quiet(self) -> None:
        while self._runtime.gate.ledger.in_flight:
            await self._runtime.gate.changed()
