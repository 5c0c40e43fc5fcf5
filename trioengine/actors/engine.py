"""The engine: the root of the actors. Its nursery holds the supervisor and one task per session."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import trio

from trioengine.actors.embedding import EmbeddingInput, embed_all
from trioengine.actors.images import KeptImages, RequestImages, put_images
from trioengine.actors.lifetime import Lifetime
from trioengine.actors.media import Media
from trioengine.actors.ports import Ports
from trioengine.actors.power_change import Level, ModeName, PowerChange, PowerState, StateSubscription, Weights
from trioengine.actors.runtime import Runtime
from trioengine.actors.session import Session
from trioengine.actors.session_opening import SessionOpening
from trioengine.actors.statistics import Statistics, statistics_of
from trioengine.aio.calls import whole_answer
from trioengine.aio.concurrency import deadline_after
from trioengine.core.checks import (
    check_callback,
    check_cause,
    check_flag,
    check_request,
    check_seconds,
    names_checked,
)
from trioengine.core.config import EngineConfig
from trioengine.core.embedding import Embeddings
from trioengine.core.errors import InvalidConfig
from trioengine.core.lifecycle import Power
from trioengine.core.messages import Adapter, Ready
from trioengine.core.power import TagName
from trioengine.core.sampling_params import Overflow, SamplingOptions, SamplingParams, merged_params, sampling_checked
from trioengine.core.tools import ToolChoice
from trioengine.core.types import Cause, Completion
from trioengine.core.wording import brief, counted
from trioengine.text.chat_template import checked_variables
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.conversation import Prompt


class Engine:
    """Runs a model: `async with open_engine(config) as engine`, or `nursery.start(Engine(config).run)`.

    `on_progress(done, total)` reports, in bytes, how far a download of the model has come; it runs in a thread.
    `on_load(done, total)` reports how far each worker has come with loading the weights; it must not block.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        ports: Ports | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        if not (config is None or isinstance(config, EngineConfig)):
            problem = f"must be an EngineConfig, got {brief(config)}; a name or path is for open_engine(...)"
            raise InvalidConfig.of("config", problem)
        check_callback("on_progress", on_progress)
        check_callback("on_load", on_load)
        self.config = EngineConfig() if config is None else config
        self.ports = Ports() if ports is None else ports
        self.runtime = Runtime(self.config, self.ports, on_load)  # the engine's parts; for servers, without a promise
        self.observers = self.runtime.observers  # each of them gets the events from when it is added
        self.config.check_cores(self.ports.num_cores)
        self._lifetime = Lifetime(self.runtime, on_progress)

    def __repr__(self) -> str:
        ledger = self.runtime.gate.ledger
        counts = f"{counted(ledger.sessions, 'session')}, {counted(ledger.in_flight, 'request')}"
        return f"<Engine {self.config.model!r} {self.state}: {counts}>"

    # ---- state ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Power:
        """The engine's state: it admits requests while it is `awake`."""
        return self.runtime.gate.power

    @property
    def power(self) -> PowerState:
        """The engine's state, with the level of its sleep, the tags that sleep, and the version of its weights."""
        return self.runtime.power.state

    @property
    def weights(self) -> Weights:
        """The weights that the model has, or will have when it wakes."""
        return self.runtime.power.weights

    @property
    def tokenizer(self) -> ChatTokenizer:
        """`encode`, `decode` and `apply_chat_template`. EngineOverloaded until the model's files are read."""
        return self.runtime.files.tokenizer

    @property
    def limits(self) -> Ready:
        """The model as its worker runs it: context, KV blocks, dtype, device. EngineOverloaded until it is READY."""
        return self.runtime.limits

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images; False until its files are read."""
        return self.runtime.takes_images

    def statistics(self) -> Statistics:
        """The counts at this moment; the worker's as it reported them last."""
        runtime = self.runtime
        return statistics_of(
            runtime.gate, runtime.supervisor, runtime.images.budget, runtime.worker_counts, runtime.ready
        )

    # ---- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[Engine] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the engine until `close`, or until cancelled; then every session is ended and the worker is gone.

        Raises ModelError when the model or an adapter cannot be used, InvalidConfig for a `max_model_len` longer than
        its context, WorkerLost when no worker can be kept running. Cancelled, it still writes the sessions' last
        messages, within `worker_shutdown_timeout`.
        """
        task_status.started(self)
        await self._lifetime.run()

    def close(self) -> None:
        """End the engine: sessions are ended, requests in flight are aborted. Harmless when closed."""
        self._lifetime.close()

    async def ready(self) -> None:
        """Wait until requests are admitted, also for the end of a sleep. Raises why, if that will never be.

        A worker whose process is dead, or was sent SIGKILL, is not waited on: its successor is.
        """
        await self._lifetime.ready()

    # ---- calls of users -------------------------------------------------------------------------------------------

    @names_checked
    def open_session(
        self,
        *,
        label: str | None = None,
        history: Sequence[Mapping[str, Any]] | None = None,
        wait: bool | None = None,
        timeout: float | None = None,
        overflow: Overflow = "refuse",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Adapter | None = None,
    ) -> Session:
        """A session, to be entered. `label` is the caller's name for it, `history` chat messages to begin with.

        `chat_template_kwargs` are variables for the chat template, such as `tools`: JSON values.
        `add_generation_prompt` and `continue_final_message` among them are as in transformers: with the latter, and
        the former false, each request's last message is an assistant's, and the answer continues it.

        `overflow` is for a chat that outgrows the context. `refuse` raises RequestRejected. `drop_oldest_turns` leaves
        the oldest turns out of the prompt until there is room for the answer: for `max_tokens`, of half of the context
        at most, or without it for a quarter of the context. System messages at the beginning, and the newest turn, are
        never dropped; a newest turn that leaves no room for a token is refused. `completion.dropped_turns` is the count
        for one request. With its commit the dropped turns leave the history; a request that is not committed leaves the
        history as it is. Prompts of token ids that do not fit are always refused.

        `adapter` is the name of a LoRA adapter, which all requests of the session use.

        Entering waits for a free slot, with `wait=True` also while the engine sleeps or is updated, and with
        `wait=False` not at all: then it raises EngineOverloaded or EngineAsleep. Raises TimedOut when the wait takes
        more than `timeout` seconds from this call, EngineClosed, and RequestRejected for a bad history. An unknown
        `overflow` or `adapter`, and template variables that are not JSON or not the caller's to set, raise
        RequestRejected here.
        """
        deadline, variables = deadline_after(timeout), checked_variables(chat_template_kwargs)
        opening = SessionOpening(history, variables=variables, wait=wait, deadline=deadline)
        state = self.runtime.new_session(opening, label=label, overflow=overflow, adapter=adapter)
        return Session(self.runtime, state)

    @whole_answer
    @sampling_checked
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        adapter: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One answer, in a session of its own, with the LoRA adapter of this name.

        Errors and keywords as in Session.generate; an adapter that is not loaded raises RequestRejected.
        """
        opening = SessionOpening(wait=wait, deadline=deadline_after(timeout), by_request=True)
        state = self.runtime.new_session(opening, adapter=adapter)
        generation = Session(self.runtime, state).generate(
            prompt,
            merged_params(params, options),
            media=media,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            timeout=timeout,
            wait=wait,
            label=label,
        )
        del prompt, media  # this frame lives as long as the answer takes, and must not keep an image
        try:
            async with generation:
                return await generation.result()
        finally:
            state.end()

    ask = whole_answer(sampling_checked(generate, "ask"))

    @whole_answer
    @names_checked
    async def embed(
        self,
        inputs: EmbeddingInput | Sequence[EmbeddingInput],
        *,
        dimensions: int | None = None,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
    ) -> Embeddings:
        """The embeddings of a text, of its token ids, or of a list of up to 2048 of these, by an embedding model.

        A vector has the length 1, and as many numbers as the model's hidden states; with `dimensions` the first so
        many of them, divided by their length. Texts get the special tokens that the tokenizer adds, token ids do not.
        Each input is a request: some are under way at a time, and if one fails, or is aborted, all end.

        `timeout`, in seconds, `wait` and `label` as in Session.generate; with `wait=False` the first input must find
        a free slot, and the others wait. Raises RequestRejected, with the index of the input, for one that is empty
        or too long, SessionEnded if one was aborted, and EngineClosed if the engine drains while inputs wait for a
        slot. Cancelled, all are aborted.
        """
        deadline = deadline_after(timeout)
        return await embed_all(self.runtime, inputs, dimensions, deadline=deadline, wait=wait, label=label)

    @names_checked
    def abort(self, request: int | str) -> int:
        """Abort the request of this id, or every request of this label, in flight or in line.

        Returns how many this call aborts: 0 if none matches, or if all were aborted before or have an outcome. A finish
        that is on its way wins.
        """
        return self.runtime.sessions.abort(check_request(request), Cause.CLIENT)

    @names_checked
    def abort_all(self, cause: Cause = Cause.ABORT_ALL, *, keep_waiting: bool = False) -> int:
        """Abort every request in flight, in preparation or in line, and return how many this call aborts.

        With `keep_waiting` those in line stay there, and get the slots of the aborted ones. Open sessions stay; a
        session that waits for its slot raises SessionEnded where it is entered, unless those in line are kept.
        """
        cause = check_cause(cause)
        keeps = check_flag("keep_waiting", keep_waiting)
        num_waiting = 0 if keeps else self.runtime.sessions.abort_waiting(cause)  # before a slot is theirs
        num_aborted = num_waiting + self.runtime.sessions.abort_all(cause)
        for observer in self.observers:
            observer.all_aborted(cause)
        return num_aborted

    @names_checked
    async def drain(self, timeout: float | None = None) -> bool:
        """Admit nothing more, and wait for the requests in flight; after `timeout` seconds abort the rest.

        True if everything ended by itself: nothing was aborted, neither by this nor by another end of the engine. After
        `worker_shutdown_timeout` more, requests that a hung worker holds are left. Requests that are suspended for a
        sleep or an update are aborted at once. Cancelled, the engine goes on draining.
        """
        seconds = math.inf if timeout is None else check_seconds(timeout)
        return await self._lifetime.drain(seconds, lambda: self.abort_all(Cause.SHUTDOWN))

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
        for a value that is not an image or if the model takes none, EngineOverloaded if the images do not fit, TimedOut
        after `timeout` seconds. Cancelled, nothing is kept. `wait` as in Session.generate.
        """
        images = RequestImages(self.runtime.images, wait=wait, deadline=deadline_after(timeout))
        prompt, sources = self.runtime.take_images(messages, where=where)
        del messages  # whose bytes need not be there while they are copied
        try:
            return KeptImages(put_images(prompt, await images.admit(sources)))
        finally:
            images.unpin()

    @names_checked
    async def sleep(
        self, level: Level = 1, *, mode: ModeName = "abort", timeout: float | None = None, keep_waiting: bool = False
    ) -> None:
        """Give the worker's memory back: the KV cache, and the weights. Level 1 keeps these in host memory.

        At level 2 a worker that is there exits, and a fresh one, asleep, takes its place; to wake, the weights are
        loaded again.

        Nothing is admitted from the first step of the call until everything is awake again: new sessions and requests
        raise EngineAsleep, or wait. `mode` is for the requests in flight: `abort` ends them with cause `sleep`; `wait`
        lets them finish, for `timeout` seconds at most; with `keep` they pause, and go on after `wake`. Requests
        in preparation are aborted in every mode. `abort` also ends the calls in line in that step: requests end with
        cause `sleep`, sessions that wait for their slot raise SessionEnded. With `keep_waiting` those that wait with
        `wait=True` stay in line; others raise EngineAsleep. Sessions keep their conversation.

        Raises RequestRejected for an unknown level or mode, and TransitionFailed where it cannot be done: while the
        engine loads or drains, or to level 1 from level 2. Where the engine sleeps at this level, it only ends, with
        `abort`, the kept requests. Cancelled, the caller does not wait any more, and the engine falls asleep all the
        same.
        """
        await self._changed(self.runtime.power.sleep(level, mode, timeout, keep_waiting=keep_waiting))

    @names_checked
    async def wake(self, tags: TagName | Collection[TagName] | None = None, *, reload: bool = True) -> None:
        """Take memory back: all of it, or `"weights"` or `"kv_cache"` alone. Requests are admitted when all is back.

        Weights that were discarded are loaded again; without `reload` they are left asleep until `update_weights`. A
        worker that has died meanwhile is started. It does nothing for parts that are awake.

        Raises RequestRejected for an unknown tag, and TransitionFailed when it fails: then all sleeps as it did before.
        Cancelled, the caller does not wait any more, and the engine wakes all the same.
        """
        await self._changed(self.runtime.power.wake(tags, reload=check_flag("reload", reload)))

    @names_checked
    async def update_weights(self, path: str | Path, *, mode: ModeName = "abort", timeout: float | None = None) -> None:
        """Go over to the weights at `path`: a file or directory like the model's, of the same architecture and shapes.

        The tokenizer and the template stay. Conversations are kept, and computed anew; requests in flight as in
        `sleep`: kept ones go on with the new weights. Asleep, the weights are checked, and loaded when they wake; those
        that a wake without `reload` has left are woken now, and TransitionFailed names this if only that fails.

        Raises RequestRejected for an unknown mode, and TransitionFailed when it fails: then the old weights stay.
        Cancelled, the caller does not wait any more, and the weights are updated all the same.
        """
        await self._changed(self.runtime.power.update_weights(path, mode, timeout))

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters: their directories, by their names."""
        return self.runtime.adapters.paths

    @names_checked
    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Add a LoRA adapter, in a directory as PEFT writes it, which sessions can have by its name from then on.

        The files are checked now. The worker reads them with the first request that uses the adapter, and again after
        a sleep, an update of the weights, its death, and when many others were used since. A request whose worker
        cannot load them raises RequestRejected.

        Raises RequestRejected for a name that is taken and for files that do not fit the model, EngineOverloaded until
        the model's files are read. Cancelled, nothing is added.
        """
        await self.runtime.adapters.add(name, path, self.runtime.files.model)

    @names_checked
    def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter; sessions that have it keep it. Raises RequestRejected for an unknown name."""
        self.runtime.adapters.remove(name)

    async def _changed(self, change: PowerChange) -> None:
        for observer in self.runtime.observers:
            observer.change_requested(change)
        await change.wait()

    def states(self) -> StateSubscription:
        """`with engine.states() as states: async for state in states`: the state now, then each that follows."""
        return self.runtime.power.states()

    @names_checked
    async def check_invariants(self, *, timeout: float = 30.0) -> None:
        """Verify, against the worker's report, that nothing leaked; under any load.

        Raises InvariantError, naming the imbalance, also when the worker does not answer within `timeout`
        seconds; EngineOverloaded while no worker runs, or while it wakes or gets other weights; WorkerLost if it dies
        meanwhile. Asleep without a worker, the engine's own books are verified.
        """
        await self.runtime.auditor.check(check_seconds(timeout))
