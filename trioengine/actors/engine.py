"""The engine: the root of the actors. Its nursery holds the supervisor and one task per session."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from trioengine.actors.auditor import Auditor
from trioengine.actors.deadline import deadline_after
from trioengine.actors.gate import Gate
from trioengine.actors.generation import Completion, Generation
from trioengine.actors.invariants import check_books
from trioengine.actors.link import Link
from trioengine.actors.nursery import open_unwrapped_nursery
from trioengine.actors.observer import Observer
from trioengine.actors.ports import Ports
from trioengine.actors.power import PowerActor, Weights
from trioengine.actors.replays import Replays
from trioengine.actors.session import Session
from trioengine.actors.sessions import Sessions
from trioengine.actors.states import PowerState, States
from trioengine.actors.statistics import Statistics, statistics_of
from trioengine.actors.supervisor import Supervisor
from trioengine.actors.worker_counts import WorkerCounts
from trioengine.core.config import EngineConfig, WorkerConfig
from trioengine.core.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    ModelError,
    RemoteProtocolError,
    WorkerLost,
)
from trioengine.core.lifecycle import Cause, Phase, Power, PowerEvent
from trioengine.core.messages import (
    Audited,
    Loading,
    Message,
    Ready,
    RequestFailed,
    SessionEnded,
    Slept,
    Tokens,
    Updated,
    Woken,
)
from trioengine.core.sampling_params import SamplingParams
from trioengine.hub.model_files import ModelInfo
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.conversation import Prompt

logger = logging.getLogger("trioengine")


class Engine:
    """Runs a model: `async with open_engine(config) as engine`, or `nursery.start(Engine(config).run)`.

    `on_progress(done, total)` is told, in bytes, how far a download of the model has come; it runs in a thread.
    `on_load(done, total)` is told how far each worker has come with loading the weights; it must not block.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        ports: Ports | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = EngineConfig() if config is None else config
        self.ports = Ports() if ports is None else ports
        self.gate = Gate(self.config)
        self.last_loss: EngineError | None = None
        self.observers: list[Observer] = []  # one that is added is told what happens from then on
        self._on_progress = on_progress
        self._on_load = on_load
        self._supervisor = Supervisor(self)
        self._model: ModelInfo | None = None
        self._tokenizer: ChatTokenizer | None = None
        self._limits: Ready | None = None
        self._sessions = Sessions()
        self.replays = Replays(self.config, self.gate, self._sessions)
        self.num_losses = 0  # of workers
        self._power = PowerActor(self)
        self._nursery: trio.Nursery | None = None
        self._closing = trio.Event()
        self._finding = trio.CancelScope()  # the model, which may take a download
        self._auditor = Auditor()
        self._worker_counts = WorkerCounts()

    def __repr__(self) -> str:
        return f"<Engine {self.config.model!r} {self.statistics()}>"

    # ---- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the engine until `close`, or until cancelled; then every session is ended and the worker is gone.

        Raises ModelError when the model cannot be used, WorkerLost when no worker can be kept running. Cancelled, it
        still writes what the sessions posted last, within `worker_shutdown_timeout`.
        """
        task_status.started(self)
        try:
            with self._finding:
                path = await self._find_model()
            if self._closing.is_set():
                return
            async with open_unwrapped_nursery() as services:
                self._power.weights = Weights(str(path), 1)
                services.start_soon(self._supervise)
                try:
                    async with trio.open_nursery() as self._nursery:
                        self._nursery.start_soon(self._power.run)
                        try:
                            await self._closing.wait()
                        finally:  # before the nursery is: nothing is admitted that could not be adopted
                            self.gate.change_power(PowerEvent.CLOSE)
                        self._nursery.cancel_scope.cancel()
                finally:
                    try:
                        self._sessions.end_all(Cause.SHUTDOWN)
                    finally:  # in any case: the supervisor is shielded
                        self._supervisor.shut_down()
        except Exception as exc:
            self.gate.failure = exc
            raise
        finally:
            self.gate.change_power(PowerEvent.CLOSE)

    async def _find_model(self) -> Path:
        path = await self.ports.find_model(self.config.model, self._on_progress)
        self._model = model = await self.ports.run_in_thread(self.ports.read_model, path)
        self._tokenizer = ChatTokenizer(model.tokenizer, model.chat_template)
        return path

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run()
        except EngineError as exc:
            self.gate.failure = exc
            self.replays.give_up_all(_as_lost(exc))
            raise

    def close(self) -> None:
        """End the engine: sessions are ended, requests in flight are aborted. Harmless when closed."""
        self._closing.set()
        self._finding.cancel()
        self.gate.change_power(PowerEvent.CLOSE)

    async def ready(self) -> None:
        """Wait until requests are admitted, also for the end of a sleep. Raises why, if that will never be."""
        while not self.gate.is_awake:
            if self.gate.power in (Power.DRAINING, Power.CLOSED):
                raise copy(self.gate.failure or EngineClosed(f"the engine is {self.gate.power.value}"))
            await self.gate.changed()

    # ---- what users call ------------------------------------------------------------------------------------------

    def open_session(
        self, *, label: str | None = None, history: Sequence[dict[str, Any]] | None = None, wait: bool = False
    ) -> Session:
        """A session, to be entered. `label` is the caller's name for it, `history` chat messages to begin with.

        Entering raises EngineClosed, EngineOverloaded when all slots are taken (with `wait` it waits), or
        RequestRejected for a bad history.
        """
        return Session(self, label=label, history=history, wait=wait)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout: float | None = None, wait: bool = False
    ) -> Completion:
        """One answer, in a session of its own. Errors, timeout and wait as in Session.generate."""
        deadline = deadline_after(timeout)
        session = Session(self, label=None, history=None, wait=wait, deadline=deadline)
        generation = Generation(session, prompt, params, keep_partial=False, deadline=deadline, wait=wait)
        async with session, generation:
            return await generation.result()

    def abort(self, request_id: int) -> bool:
        """Abort a request by its id; False if it is not in flight (it may have finished)."""
        return self._sessions.abort(request_id, Cause.CLIENT)

    def abort_all(self, cause: Cause = Cause.ABORT_ALL) -> None:
        """Abort every request in flight, those in preparation, too. Sessions stay."""
        self._sessions.abort_all(cause)

    async def drain(self, timeout: float | None = None) -> bool:
        """Admit nothing more, and wait for what is in flight; after `timeout` seconds abort the rest.

        True if everything ended by itself: nothing was aborted, neither by this nor by who else ends the engine. What
        a hung worker does not let go of is left after `worker_shutdown_timeout` more. What is suspended for a sleep or
        an update is aborted at once. Cancelled, the engine goes on draining.
        """
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout must not be negative, got {timeout}")
        causes = self.gate.ledger.abort_causes
        before = causes[Cause.SHUTDOWN]
        is_changing = not self._power.runs_requests or self.gate.num_pending
        self.gate.change_power(PowerEvent.DRAIN)
        if is_changing:
            self.abort_phase(Phase.SUSPENDED, Cause.SHUTDOWN)
        with trio.move_on_after(float("inf") if timeout is None else timeout):
            await self._quiet()
            return causes[Cause.SHUTDOWN] == before
        self.abort_all(Cause.SHUTDOWN)
        with trio.move_on_after(self.config.worker_shutdown_timeout):
            await self._quiet()
        return False

    async def _quiet(self) -> None:
        while self.gate.ledger.in_flight:
            await self.gate.changed()

    async def sleep(self, level: int = 1, *, mode: str = "abort", timeout: float | None = None) -> None:
        """Give the worker's memory back: the KV cache, and the weights. Level 1 keeps these in host memory.

        At level 2 the worker exits and a fresh one, asleep, takes its place; the weights are loaded again to wake.

        Nothing is admitted from the first step of the call until everything is awake again: new sessions and requests
        raise EngineAsleep, or wait. `mode` is for the requests in flight: `abort` ends them with cause `sleep`; `wait`
        lets them finish, for `timeout` seconds at most; with `keep` they pause, and go on after `wake`. What is being
        prepared is aborted in every mode. Sessions keep their conversation.

        Raises ValueError for an unknown level or mode, and TransitionFailed where it cannot be done: while the engine
        loads or drains, or to level 1 from level 2. Where the engine sleeps at this level, it only ends, with
        `abort`, what was kept. Cancelled, the caller does not wait any more, and the engine falls asleep all the same.
        """
        await self._power.sleep(level, mode, timeout).wait()

    async def wake(self, tags: Collection[str] | None = None, *, reload: bool = True) -> None:
        """Take memory back: all of it, or `weights` or `kv_cache` alone. Requests are admitted when all is back.

        Weights that were discarded are loaded again; without `reload` they are left asleep until `update_weights`. A
        worker that has died meanwhile is started. It does nothing for what is awake.

        Raises ValueError for an unknown tag, and TransitionFailed when it fails: then all sleeps as it did before.
        Cancelled, the caller does not wait any more, and the engine wakes all the same.
        """
        await self._power.wake(tags, reload=reload).wait()

    async def update_weights(self, path: str | Path, *, mode: str = "abort", timeout: float | None = None) -> None:
        """Go over to the weights at `path`: a file or directory like the model's, of the same architecture and shapes.

        The tokenizer and the template stay. Conversations are kept, and computed anew; requests in flight as in
        `sleep`: kept ones go on with the new weights. Asleep, the weights are checked, and loaded when they wake; those
        that a wake without `reload` has left are woken now, and TransitionFailed says so if only that fails.

        Raises ValueError for an unknown mode, and TransitionFailed when it fails: then the old weights stay. Cancelled,
        the caller does not wait any more, and the weights are updated all the same.
        """
        await self._power.update_weights(path, mode, timeout).wait()

    @property
    def power(self) -> PowerState:
        """The engine's state, what sleeps of it, and which weights it has."""
        return self._power.state

    def states(self) -> States:
        """`with engine.states() as states: async for state in states`: the state now, then each that follows."""
        return self._power.states()

    def statistics(self) -> Statistics:
        """The counts at this moment; those of the worker as it said last."""
        kv_blocks_total = self._limits.kv_blocks_total if self._limits is not None else 0
        return statistics_of(self.gate, self._supervisor, self._worker_counts, kv_blocks_total)

    @property
    def is_responsive(self) -> bool:
        """False while a worker hangs: it has not answered for half of `unresponsive_timeout`, and will be killed."""
        current = self._supervisor.current
        return current is None or current.is_responsive

    async def check_invariants(self, *, timeout: float = 30.0) -> None:
        """Verify, against what the worker says it holds, that nothing leaked; under any load.

        Raises InvariantError with what does not balance, also when the worker does not answer within `timeout`
        seconds; EngineOverloaded while there is no worker, or while it wakes or gets other weights; WorkerLost when it
        dies meanwhile. Asleep without a worker, the engine's own books are verified.
        """
        self.gate.check()
        check_books(self.gate.ledger, self._sessions)
        link, power = self.gate.link, self.gate.power
        if power is Power.CLOSED:
            raise EngineClosed("the engine is closed")
        if link is None and power is Power.ASLEEP:
            return  # whatever worker there is holds nothing
        if link is None:
            raise EngineOverloaded("there is no worker to ask", code=power.value)
        if power in (Power.WAKING, Power.UPDATING):
            raise EngineOverloaded("the worker may be loading weights", code=power.value)
        await self._auditor.audit(link, self.gate.mint(), self._sessions.attached, timeout)

    @property
    def model(self) -> ModelInfo:
        """The model's files: tokenizer, chat template, limits. EngineOverloaded until they are read."""
        if self._model is None:
            raise EngineOverloaded("the model is not loaded yet", code="loading")
        return self._model

    @property
    def tokenizer(self) -> ChatTokenizer:
        """`encode`, `decode` and `apply_chat_template`. EngineOverloaded until the model's files are read."""
        if self._tokenizer is None:
            raise EngineOverloaded("the model is not loaded yet", code="loading")
        return self._tokenizer

    @property
    def limits(self) -> Ready:
        """What the worker said of the model when it was READY. EngineOverloaded until then."""
        if self._limits is None:
            raise EngineOverloaded("the model is not loaded yet", code="loading")
        return self._limits

    @property
    def weights(self) -> Weights:
        """The weights that the model has, or will have when it wakes."""
        return self._power.weights

    # ---- what the power actor, sessions, supervisor and link call; synchronous ------------------------------------

    @property
    def wants_worker(self) -> bool:
        """Whether a worker that was lost is to be replaced now."""
        return self._power.wants_worker

    @property
    def is_asleep(self) -> bool:
        """Whether anything of the worker's memory sleeps."""
        return bool(self._power.asleep)

    @property
    def is_starting(self) -> bool:
        """Whether there is a worker that is not READY."""
        return self.gate.link is None and self._supervisor.current is not None

    @property
    def holds_sessions(self) -> bool:
        """Whether the worker holds any session."""
        return any(session.attached for session in self._sessions)

    def retire_worker(self) -> None:
        """Let the worker exit, which holds no session; nothing more is posted to it."""
        self.gate.link = None
        self._supervisor.retire()

    def worker_config(self) -> WorkerConfig:
        """What a worker that starts now is to be."""
        path, version = self.weights
        limits = self._limits
        asleep = tuple(sorted(self._power.starts_asleep, key=lambda tag: tag.value))
        config = replace(self.config.for_worker(path), weight_version=version, asleep=asleep)
        if limits is None:
            return config
        return replace(config, kv_blocks=limits.kv_blocks_total, max_model_len=limits.max_model_len)  # as they were

    async def check_model(self, path: str) -> None:
        """ModelError where the files at `path` are not those of the same model with other weights."""
        found, own = await self.ports.run_in_thread(self.ports.read_model, Path(path)), self.model
        for name in ("model_type", "vocab_size"):
            has, wants = getattr(found, name), getattr(own, name)
            if has != wants:
                raise ModelError(f"{path}: {name} is {has}, the model's is {wants}")

    def abort_phase(self, phase: Phase, cause: Cause) -> None:
        """Abort the requests that are in this phase."""
        self._sessions.abort_phase(phase, cause)

    def detach_all(self) -> None:
        """The worker is to forget every session; requests in flight are suspended."""
        self._sessions.detach_all()
        self.replays.forget_suspects()

    def adopt(self, session: Session) -> None:
        """A session was opened: its task begins."""
        assert self._nursery is not None, "sessions are admitted while the nursery is open"
        self._sessions.add(session)
        self._nursery.start_soon(session.run, name=f"session-{session.id}")

    def release(self, session: Session) -> None:
        """The worker has let go of a session: its slot is free."""
        self._sessions.remove(session)
        self.gate.free_session()

    def request_finished(self) -> None:
        """A request ran to its end."""
        self._supervisor.request_finished()

    def on_loading(self, message: Loading) -> None:
        if self._on_load is not None:
            self._on_load(message.done, message.total)

    def on_ready(self, limits: Ready, link: Link) -> None:
        if limits.weight_version != self.weights.version:
            raise RemoteProtocolError(f"READY with weights {limits.weight_version}, not {self.weights.version}")
        self._limits = limits
        self._power.on_ready()
        self.gate.link = link
        if self._power.runs_requests:
            self.replays.resume(link)
        if not self.replays.has_suspects:
            self.gate.change_power(PowerEvent.READY)
        self.gate.notify()
        logger.info("ready: %s on %s", self.config.model, limits.device)
        asked, has = self.config.max_model_len, limits.max_model_len
        if asked is not None and asked > has:
            logger.warning("max_model_len: asked for %d, the model and its KV cache have %d", asked, has)

    def on_message(self, message: Message) -> None:
        """A frame of the worker."""
        match message:
            case Tokens():
                self._on_step(self._worker_counts.on_tokens(message))
                self._sessions.on_tokens(message)
            case RequestFailed():
                self._sessions.on_failed(message)
            case SessionEnded():
                self._worker_counts.on_statistics(message.statistics)
                self.replays.on_detached(self._sessions.on_ended(message))
                self.gate.notify()
            case Slept() | Woken() | Updated():
                self._power.on_answer(message)
            case Audited():
                self._worker_counts.on_audited(message)
                self._auditor.on_audited(message)
            case _:
                raise AssertionError(f"nobody handles {type(message).__name__}")

    def _on_step(self, num_tokens: int) -> None:
        if num_tokens > 0:
            for observer in self.observers:
                observer.step(num_tokens)

    def on_worker_lost(self, error: EngineError) -> bool:
        """The incarnation is dead and reaped: everything in flight on it is settled or suspended, in one step.

        Whether the death counts against the worker, and not against a request.
        """
        self.last_loss = error
        self.num_losses += 1
        self.gate.link = None
        running = self._sessions.running
        self._worker_counts.on_worker_lost()
        if self.gate.power is not Power.CLOSED:
            self.gate.change_power(PowerEvent.WORKER_LOST)
        lost = _as_lost(error)
        self._sessions.on_worker_lost()
        suspended = [session for session in running if session.phase is Phase.SUSPENDED]
        self._power.on_worker_lost()
        self._auditor.on_worker_lost(lost)
        return self.replays.on_worker_lost(suspended, lost)


def _as_lost(error: EngineError) -> WorkerLost:
    return error if isinstance(error, WorkerLost) else WorkerLost(str(error))


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None,
    *,
    ports: Ports | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_load: Callable[[int, int], None] | None = None,
) -> AsyncIterator[Engine]:
    """An engine that is ready; leaving ends its sessions and its worker, whatever happens in the body.

    Raises ModelError or WorkerLost when it cannot start, or dies for good later (the body is cancelled then, and what
    it raises of requests that died with the engine is not told apart). A single exception of the body comes out as it
    is, not in a group.
    """
    engine = Engine(config, ports=ports, on_progress=on_progress, on_load=on_load)
    try:
        async with open_unwrapped_nursery() as nursery:
            nursery.start_soon(engine.run)
            await engine.ready()
            yield engine
            engine.close()
    except BaseExceptionGroup as group:
        if engine.gate.failure is not None and group.split(EngineError)[1] is None:
            raise engine.gate.failure from engine.gate.failure.__cause__
        raise
