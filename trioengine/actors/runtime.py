"""The runtime of an engine: its parts, one dispatcher for the worker's messages, and one handler for all effects.

Everything that happens to an engine comes in one of four ways: a call of a user, a message of the worker (`dispatch`),
the death of a worker (`_on_worker_lost`), or a deadline that a session's task keeps. Each is one synchronous step: it
causes transitions, and drains the effects that they added (`_carry_out`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import trio

from trioengine.actors.adapters import Adapters
from trioengine.actors.attachment import Post
from trioengine.actors.audit import Auditor
from trioengine.actors.effects import Effects
from trioengine.actors.gate import Gate, PowerChanged
from trioengine.actors.grammars import Grammars
from trioengine.actors.images import ImageStore, take_images
from trioengine.actors.incarnation import Incarnation
from trioengine.actors.media import ImageSource, Media
from trioengine.actors.model_files import ModelFiles, check_draft_model, check_other_weights, read_model_files
from trioengine.actors.observer import Observer
from trioengine.actors.ports import Ports
from trioengine.actors.power import PowerActor
from trioengine.actors.recovery import Recovery
from trioengine.actors.request import Request
from trioengine.actors.request_times import StepTimes
from trioengine.actors.session_actor import AnswerBegan, RequestSettled, SessionActor, SessionFreed
from trioengine.actors.session_opening import SessionOpening
from trioengine.actors.session_task import run_session
from trioengine.actors.sessions import Sessions
from trioengine.actors.statistics import WorkerCounts
from trioengine.actors.supervisor import Settlement, Supervisor
from trioengine.core.config import EngineConfig, WorkerConfig
from trioengine.core.errors import (
    EngineError,
    EngineOverloaded,
    RemoteProtocolError,
    RequestRejected,
    WorkerLost,
)
from trioengine.core.lifecycle import Phase, Power, PowerEvent
from trioengine.core.messages import (
    Adapter,
    Audited,
    Fatal,
    Loading,
    Message,
    PayloadConsumed,
    Pong,
    Ready,
    RequestFailed,
    SessionEnded,
    Slept,
    Tokens,
    Updated,
    Woken,
)
from trioengine.core.power import sorted_tags
from trioengine.core.sampling_params import Overflow

logger = logging.getLogger("trioengine")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class SessionDetached:
    """Effect: the worker has let go of the session."""

    session: SessionActor


class Runtime:
    """The parts of one engine, and the steps that involve several of them."""

    def __init__(self, config: EngineConfig, ports: Ports, on_load: Callable[[int, int], None] | None) -> None:
        self.config = config
        self.ports = ports
        self.observers: list[Observer] = []  # one that is added observes from then on
        self.effects = Effects(self._carry_out)
        self.gate = Gate(config, self.effects, self.observers)
        self.images = ImageStore(config, ports, self.observers)
        self.grammars = Grammars(ports)
        self.adapters = Adapters(ports, self.gate.mint)
        self.sessions = Sessions(self.effects)
        self.recovery = Recovery(config, self.gate, self.sessions)
        self.supervisor = Supervisor(
            config,
            ports,
            self.gate,
            desired=lambda: self.power.desired_worker,
            worker_config=self._worker_config,
            dispatch=self.dispatch,
            on_lost=self._on_worker_lost,
            observers=self.observers,
        )
        self.power = PowerActor(self.gate, self.sessions, self.recovery, self.supervisor, self._check_model)
        self.auditor = Auditor(self.gate, self.sessions, self.images.budget)
        self.worker_counts = WorkerCounts()
        self.nursery: trio.Nursery | None = None  # of the sessions' tasks
        self._on_load = on_load
        self._files: ModelFiles | None = None
        self._limits: Ready | None = None
        self._draft_path: str | None = None  # of the draft model, if there is one

    # ---- the model ------------------------------------------------------------------------------------------------

    async def read_models(self, on_progress: Callable[[int, int], None] | None) -> Path:
        """Find and read the model's files, and the draft model's; return the model's path.

        Raises ModelError, and InvalidConfig for a `max_model_len` beyond the model's context.
        """
        path = await self.ports.find_model(self.config.model, on_progress)
        self._files = await read_model_files(path, self.config, self.ports, self.adapters)
        if self.config.draft_model is not None:
            draft_path = await self.ports.find_model(self.config.draft_model, on_progress)
            await check_draft_model(draft_path, self.files.model, self.config, self.ports)
            self._draft_path = str(draft_path)
        return path

    @property
    def has_model(self) -> bool:
        """Whether the model's files are read, and its first adapters are checked."""
        return self._files is not None

    @property
    def files(self) -> ModelFiles:
        """The content of the model's files. EngineOverloaded until they are read."""
        return _loaded(self._files)

    @property
    def limits(self) -> Ready:
        """The last READY of a worker. EngineOverloaded until the first one."""
        return _loaded(self._limits)

    @property
    def ready(self) -> Ready | None:
        """The last READY of a worker; None until the first one."""
        return self._limits

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images; False until its files are read."""
        return self._files is not None and not self._files.tokenizer.image_refusal

    def take_images(
        self, prompt: Any, media: Sequence[Media] = (), *, where: str = "prompt"
    ) -> tuple[Any, list[ImageSource]]:
        """Split a prompt into one without images and the images' sources, which are still to be admitted.

        Raises RequestRejected for a value that cannot be an image, and where the model takes none.
        """
        if isinstance(prompt, str) and media == ():
            return prompt, []
        prompt, sources = take_images(prompt, media, max_bytes=self.images.max_bytes, where=where)
        if sources and (refusal := self.files.tokenizer.image_refusal):
            raise RequestRejected.at(sources[0].where, "images_not_supported", refusal)
        return prompt, sources

    async def _check_model(self, path: str) -> None:
        await check_other_weights(Path(path), self.files.model, self.ports)

    # ---- sessions -------------------------------------------------------------------------------------------------

    def new_session(
        self,
        opening: SessionOpening,
        *,
        label: str | None = None,
        overflow: Overflow = "refuse",
        adapter: str | Adapter | None = None,
    ) -> SessionActor:
        """A session without a slot. Raises RequestRejected for the name of an adapter that is not loaded."""
        return SessionActor(
            self.gate,
            self.effects,
            self.images,
            self.observers,
            opening=opening,
            label=label,
            overflow=overflow,
            adapter=adapter if adapter is None or isinstance(adapter, Adapter) else self.adapters.find(adapter),
        )

    def adopt(self, session: SessionActor) -> None:
        """Take a session slot for a session, and start its task."""
        session.id = self.gate.admit_session()
        assert self.nursery is not None, "sessions are admitted while the nursery is open"
        self.sessions.add(session)
        self.nursery.start_soon(run_session, session, self.gate, name=f"session-{session.id}")

    # ---- effects --------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: object) -> None:
        """Carry out one effect. The ledger is balanced already; recovery comes before the callers in line."""
        match effect:
            case Post(link, message, payloads, crash):
                try:
                    link.post_with(message, payloads)
                except Exception as exc:
                    crash(exc)
            case AnswerBegan(session, request, is_answer):
                if is_answer:
                    request.add_weights(self.power.weights.version)
                    self.supervisor.deaths = 0
                self.recovery.on_progress(session, request)
            case RequestSettled(session, request):
                request.report_end()
                self.recovery.on_progress(session, request)
                self.gate.serve_requests()
            case SessionDetached(session):
                self.recovery.on_detached(session)
                self.gate.notify()
            case SessionFreed(session):
                self.sessions.remove(session)
                self.gate.free_session()
                session.released.set()
            case PowerChanged():
                self.power.publish()
                self.gate.serve()
            case _:
                raise AssertionError(f"no handler for {effect}")

    @property
    def is_responsive(self) -> bool:
        """False while a worker hangs: it has not answered for half of `unresponsive_timeout`, and will be killed."""
        current = self.supervisor.current
        return current is None or current.is_responsive

    # ---- the worker -----------------------------------------------------------------------------------------------

    def _worker_config(self) -> WorkerConfig:
        """The configuration of a worker that starts now."""
        path, version = self.power.weights
        limits = self._limits
        asleep = sorted_tags(self.power.desired_worker.asleep)
        config = replace(self.config.for_worker(path, self._draft_path), weight_version=version, asleep=asleep)
        if limits is None:
            return config
        return replace(  # as they were
            config,
            kv_blocks=limits.kv_blocks_total,
            state_slots=limits.state_slots,
            window_blocks=limits.window_blocks_total,
            max_model_len=limits.max_model_len,
        )

    def dispatch(self, incarnation: Incarnation, message: Message) -> None:
        """Handle a message of the worker, in one step."""
        match message:
            case Tokens():
                self._on_tokens(message)
            case RequestFailed():
                session = self.sessions.by_id[message.session]
                session.attempt(session.on_failed, message)
            case SessionEnded():
                self.worker_counts.latest = message.statistics
                session = self.sessions.by_id[message.session]
                session.attempt(session.on_ended)
                self.effects.append(SessionDetached(session))
            case PayloadConsumed():
                incarnation.link.on_consumed(message)
            case Pong():
                incarnation.on_pong(message)
            case Loading():
                incarnation.on_loading()
                if self._on_load is not None:
                    self._on_load(message.done, message.total)
            case Ready():
                incarnation.on_ready()
                self._on_ready(message, incarnation)
            case Slept() | Woken():
                incarnation.link.on_reply(message)
            case Updated():
                if message.error is None:
                    self._limits = replace(self.limits, quantization=message.quantization)
                incarnation.link.on_reply(message)
            case Audited():
                self.worker_counts.on_audited(message)
                self.auditor.on_audited(message)
            case Fatal():
                incarnation.on_fatal(message)
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")
        if self.effects:
            self.effects.drain()

    def _on_tokens(self, message: Tokens) -> None:
        """The rows of a step: first all of them, then their consequences, then the readers, who may take a while."""
        before, self.worker_counts.latest = self.worker_counts.latest, message.statistics
        num_tokens = message.statistics.num_tokens - (0 if before is None else before.num_tokens)
        if num_tokens > 0:  # 0 in rows of no step
            for observer in self.observers:
                observer.step(num_tokens)
        step = StepTimes()
        readers: list[tuple[SessionActor, Request | None]] = []
        crashed: list[tuple[SessionActor, Exception]] = []
        for row in message.rows:
            session = self.sessions.by_id[row.session]
            readers.append((session, session.request))  # before the row, which may be the last one
            try:
                session.on_row(row, step)
            except Exception as exc:
                crashed.append((session, exc))
        if step.gaps:
            for observer in self.observers:
                observer.next_tokens(step.gaps)
        for session, error in crashed:
            session.crash(error)
        if self.effects:
            self.effects.drain()
        for session, request in readers:
            if request is not None:
                try:
                    request.notify_reader()
                except Exception as exc:
                    session.crash(exc)

    def _on_ready(self, limits: Ready, incarnation: Incarnation) -> None:
        version = self.power.weights.version
        if limits.weight_version != version:
            raise RemoteProtocolError(f"READY with weights {limits.weight_version}, not {version}")
        self._limits = limits
        self.gate.link = incarnation.link
        if self.power.desired_worker.runs_requests:
            self.recovery.resume(incarnation.link)
        if not self.recovery.has_suspects:
            self.gate.change_power(PowerEvent.READY)
        self.effects.drain()
        self.gate.notify()
        state = "ready" if self.gate.power is Power.AWAKE else f"a worker has started ({self.gate.power.value})"
        integers = "" if limits.quantization == "none" else f", quantization {limits.quantization}"
        if limits.kv_cache_dtype != limits.dtype:
            integers += f", KV cache {limits.kv_cache_dtype}"
        models = self.config.model
        if self.config.draft_model is not None:
            models += f" with drafts by {self.config.draft_model}"
        logger.info("%s: %s on %s, %s kernels%s", state, models, limits.device, limits.kernels, integers)
        asked, has = self.config.max_model_len, limits.max_model_len
        if asked is not None and asked > has:
            hint = "kv_cache_memory makes it larger"
            logger.warning("max_model_len is %d, but the KV cache holds %d tokens; %s", asked, has, hint)

    def _on_worker_lost(self, error: EngineError) -> Settlement:
        """The incarnation is dead and reaped: settle or suspend everything that was in flight on it, in one step."""
        self.gate.link = None
        running = self.sessions.running
        self.worker_counts.on_worker_lost()
        if self.gate.power is not Power.CLOSED:
            self.gate.change_power(PowerEvent.WORKER_LOST)
        lost = as_lost(error)
        for session in self.sessions:
            session.attempt(session.on_worker_lost)
        self.effects.drain()
        suspended = [session for session in running if session.phase is Phase.SUSPENDED]
        self.auditor.on_worker_lost(lost)
        num_suspended = len(self.sessions.suspended)
        counts = self.recovery.on_worker_lost(suspended, lost)
        self.effects.drain()
        num_resumed = len(self.sessions.suspended)
        return Settlement(counts, num_resumed, num_suspended - num_resumed)

    def give_up(self, error: EngineError) -> None:
        """No worker can be kept running: admit nothing more, and fail the suspended requests."""
        self.gate.failure = error
        self.gate.change_power(PowerEvent.CLOSE)
        self.recovery.give_up_all(as_lost(error))
        self.effects.drain()
        for observer in self.observers:
            observer.engine_failed(error)


def as_lost(error: EngineError) -> WorkerLost:
    """The error of the requests that failed with the worker."""
    return error if isinstance(error, WorkerLost) else WorkerLost(str(error))


def _loaded(part: Part | None) -> Part:
    if part is None:
        raise EngineOverloaded("the model is not loaded yet", code="loading")
    return part
