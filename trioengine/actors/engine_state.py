"""An engine's parts, and what they tell each other: what becomes of a frame, of a worker that is READY or lost.

All of it is synchronous, but for the check of a model's files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import trio

from trioengine.actors.auditor import Auditor
from trioengine.actors.gate import Gate
from trioengine.actors.image_parts import put_images, take_images
from trioengine.actors.images import RequestImages
from trioengine.actors.kept_images import KeptImages
from trioengine.actors.link import Link
from trioengine.actors.media import ImageSource, Media
from trioengine.actors.observer import Observer
from trioengine.actors.payload import PayloadBudget
from trioengine.actors.ports import Ports
from trioengine.actors.power import PowerActor
from trioengine.actors.power_change import Weights
from trioengine.actors.replays import Replays
from trioengine.actors.session import Session
from trioengine.actors.sessions import Sessions
from trioengine.actors.states import PowerState
from trioengine.actors.statistics import Statistics, statistics_of
from trioengine.actors.supervisor import Supervisor
from trioengine.actors.worker_counts import WorkerCounts
from trioengine.aio.deadline import deadline_after
from trioengine.core.arguments import names_checked
from trioengine.core.config import EngineConfig, WorkerConfig
from trioengine.core.errors import (
    EngineError,
    EngineOverloaded,
    ModelError,
    RemoteProtocolError,
    RequestRejected,
    WorkerLost,
)
from trioengine.core.image import MAX_IMAGE_BYTES
from trioengine.core.lifecycle import Phase, Power, PowerEvent
from trioengine.core.messages import Audited, Loading, Message, Ready, RequestFailed, SessionEnded, Tokens
from trioengine.core.power import DesiredWorker, sorted_tags
from trioengine.hub.model_info import ModelInfo
from trioengine.text.chat_tokenizer import ChatTokenizer

logger = logging.getLogger("trioengine")
Part = TypeVar("Part")


class Settlement(NamedTuple):
    """The consequences of a worker's death."""

    counts_against_worker: bool  # and not against a request
    num_resumed: int  # requests that go on with the next worker
    num_failed: int  # requests


class EngineState:
    """Base class of Engine: its parts, and the messages and deaths of its workers."""

    def __init__(self, config: EngineConfig, ports: Ports, on_load: Callable[[int, int], None] | None) -> None:
        self.config = config
        self.ports = ports
        self.observers: list[Observer] = []  # one that is added is told what happens from then on
        self.gate = Gate(config, self.observers)
        self.payloads = PayloadBudget(config.payload_memory, ports.max_payloads(), self.observers)
        self.sealing = trio.Semaphore(1)  # images are copied one request after the other: the cores are for answers
        self.secret = ports.mint_secret()  # keys the digests of images
        self._sessions = Sessions()
        self.replays = Replays(config, self.gate, self._sessions)
        self._supervisor = Supervisor(self)
        self._power = PowerActor(self.gate, self._sessions, self.replays, self._supervisor, self._check_model)
        self._auditor = Auditor()
        self._worker_counts = WorkerCounts()
        self._nursery: trio.Nursery | None = None  # of the sessions
        self._on_load = on_load
        self._model: ModelInfo | None = None
        self._tokenizer: ChatTokenizer | None = None
        self._limits: Ready | None = None

    # ---- what it is now -------------------------------------------------------------------------------------------

    @property
    def state(self) -> Power:
        """The engine's state: it admits requests while it is `awake`."""
        return self.gate.power

    @property
    def power(self) -> PowerState:
        """The engine's state, with the level of its sleep, the tags that sleep, and the version of its weights."""
        return self._power.state

    @property
    def weights(self) -> Weights:
        """The weights that the model has, or will have when it wakes."""
        return self._power.weights

    @property
    def model(self) -> ModelInfo:
        """The model's files: tokenizer, chat template, limits. EngineOverloaded until they are read."""
        return _loaded(self._model)

    @property
    def tokenizer(self) -> ChatTokenizer:
        """`encode`, `decode` and `apply_chat_template`. EngineOverloaded until the model's files are read."""
        return _loaded(self._tokenizer)

    @property
    def limits(self) -> Ready:
        """What the worker said of the model when it was READY. EngineOverloaded until then."""
        return _loaded(self._limits)

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images; False until its files are read."""
        return self._tokenizer is not None and not self._tokenizer.image_refusal

    def statistics(self) -> Statistics:
        """The counts at this moment; those of the worker as it said last."""
        kv_blocks_total = self._limits.kv_blocks_total if self._limits is not None else 0
        return statistics_of(self.gate, self._supervisor, self.payloads, self._worker_counts, kv_blocks_total)

    def take_images(
        self, prompt: Any, media: Sequence[Media] = (), *, where: str = "prompt"
    ) -> tuple[Any, list[ImageSource]]:
        """A prompt without its images, and these, to be admitted.

        Raises RequestRejected for what cannot be an image, and where the model takes none.
        """
        prompt, sources = take_images(
            prompt, media, max_bytes=min(self.config.payload_memory, MAX_IMAGE_BYTES), where=where
        )
        if sources and (refusal := self.tokenizer.image_refusal):
            raise RequestRejected.at(sources[0].where, "images_not_supported", refusal)
        return prompt, sources

    @names_checked
    async def keep_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        where: str = "messages",
        timeout: float | None = None,
        wait: bool | None = None,
    ) -> KeptImages:
        """These messages with an Image in the place of each image's bytes, for later requests of any session.

        The bytes are copied out of this process's memory, and kept until they are released, as long as there is room.
        Errors name the part that they are about: `where`, the message's index, and the part's. Raises RequestRejected
        for what is no image and where the model takes none, EngineOverloaded where there is no room, TimedOut after
        `timeout` seconds. Cancelled, nothing is kept. `wait` as in Session.generate.
        """
        images = RequestImages(self, wait=wait, deadline=deadline_after(timeout))
        prompt, sources = self.take_images(messages, where=where)
        del messages  # whose bytes need not be there while they are copied
        try:
            return KeptImages(put_images(prompt, await images.admit(sources)))
        finally:
            images.unpin()

    # ---- sessions -------------------------------------------------------------------------------------------------

    def opening(self, session: Session) -> AbstractContextManager[None]:
        """Within, a session waits for its slot."""
        return self._sessions.opening(session)

    def adopt(self, session: Session) -> None:
        """A session was opened: its task begins."""
        assert self._nursery is not None, "sessions are admitted while the nursery is open"
        self._sessions.add(session)
        self._nursery.start_soon(session.run, name=f"session-{session.id}")

    def release(self, session: Session) -> None:
        """The worker has let go of a session: its slot is free."""
        self._sessions.remove(session)
        self.gate.free_session()

    def reset_deaths(self) -> None:
        """Forget the worker's deaths so far: a token was delivered."""
        self._supervisor.reset_deaths()

    # ---- workers --------------------------------------------------------------------------------------------------

    @property
    def desired_worker(self) -> DesiredWorker:
        """What a worker is needed for now."""
        return self._power.desired_worker

    def worker_config(self) -> WorkerConfig:
        """What a worker that starts now is to be."""
        path, version = self.weights
        limits = self._limits
        asleep = sorted_tags(self.desired_worker.asleep)
        config = replace(self.config.for_worker(path), weight_version=version, asleep=asleep)
        if limits is None:
            return config
        return replace(config, kv_blocks=limits.kv_blocks_total, max_model_len=limits.max_model_len)  # as they were

    async def _check_model(self, path: str) -> None:
        found, own = await self.ports.run_in_thread(self.ports.read_model, Path(path)), self.model
        for name in ("model_type", "vocab_size"):
            has, wants = getattr(found, name), getattr(own, name)
            if has != wants:
                raise ModelError(f"{path}: {name} is {has}, the model's is {wants}")

    def on_loading(self, message: Loading) -> None:
        if self._on_load is not None:
            self._on_load(message.done, message.total)

    def on_ready(self, limits: Ready, link: Link) -> None:
        if limits.weight_version != self.weights.version:
            raise RemoteProtocolError(f"READY with weights {limits.weight_version}, not {self.weights.version}")
        self._limits = limits
        self.gate.link = link
        if self.desired_worker.runs_requests:
            self.replays.resume(link)
        if not self.replays.has_suspects:
            self.gate.change_power(PowerEvent.READY)
        self.gate.notify()
        state = "ready" if self.gate.power is Power.AWAKE else f"a worker has started ({self.gate.power.value})"
        logger.info("%s: %s on %s, %s kernels", state, self.config.model, limits.device, limits.kernels)
        asked, has = self.config.max_model_len, limits.max_model_len
        if asked is not None and asked > has:
            hint = "kv_cache_memory makes it larger"
            logger.warning("max_model_len is %d, but the KV cache holds %d tokens; %s", asked, has, hint)

    def on_message(self, message: Message) -> None:
        """A frame of the worker about its sessions."""
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
            case Audited():
                self._worker_counts.on_audited(message)
                self._auditor.on_audited(message)
            case _:
                raise AssertionError(f"nobody handles {type(message).__name__}")

    def _on_step(self, num_tokens: int) -> None:
        if num_tokens > 0:
            for observer in self.observers:
                observer.step(num_tokens)

    def on_worker_lost(self, error: EngineError) -> Settlement:
        """The incarnation is dead and reaped: everything in flight on it is settled or suspended, in one step."""
        self.gate.link = None
        running = self._sessions.running
        self._worker_counts.on_worker_lost()
        if self.gate.power is not Power.CLOSED:
            self.gate.change_power(PowerEvent.WORKER_LOST)
        lost = as_lost(error)
        self._sessions.on_worker_lost()
        suspended = [session for session in running if session.phase is Phase.SUSPENDED]
        self._auditor.on_worker_lost(lost)
        num_suspended = len(self._sessions.suspended)
        counts = self.replays.on_worker_lost(suspended, lost)
        num_resumed = len(self._sessions.suspended)
        return Settlement(counts, num_resumed, num_suspended - num_resumed)


def as_lost(error: EngineError) -> WorkerLost:
    """What requests are told that went down with the worker."""
    return error if isinstance(error, WorkerLost) else WorkerLost(str(error))


def _loaded(part: Part | None) -> Part:
    if part is None:
        raise EngineOverloaded("the model is not loaded yet", code="loading")
    return part
