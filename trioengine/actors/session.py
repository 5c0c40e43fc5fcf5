"""A session: a conversation, its one request at a time, and its life on the worker.

All transitions are synchronous methods; the handle, the task and the link call them, and the first wins. The table in
`core.lifecycle` says what happens; here each action is carried out, and the conversation kept.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio

from trioengine.actors.generation import Generation, deadline_after
from trioengine.core.errors import (
    EngineClosed,
    EngineError,
    EngineOverloaded,
    FrameTooLarge,
    RequestRejected,
    SessionBusy,
    SessionEnded,
    WorkerLost,
)
from trioengine.core.ledger import Stand
from trioengine.core.lifecycle import Action, Attachment, Cause, Event, Outcome, Phase, SessionLifecycle
from trioengine.core.messages import (
    AddMessage,
    AddSession,
    EndSession,
    FinishReason,
    RequestFailed,
    StopSession,
    TokenIds,
    TokensRow,
    token_ids,
)
from trioengine.core.sampling_params import SamplingParams
from trioengine.text.answer import Answer
from trioengine.text.conversation import Conversation, Prepared, Prompt, prompt_length

if TYPE_CHECKING:
    from trioengine.actors.engine import Engine
    from trioengine.actors.link import Link

logger = logging.getLogger("trioengine")
THREAD_THRESHOLD = 1 << 13  # characters or tokens; a longer prompt is prepared in a thread


class Session:
    """One session: `async with engine.open_session() as session`.

    Entering takes a session slot. Leaving, in whatever way, ends the session: a request in flight is aborted,
    END_SESSION is posted in the same step, and nothing is waited for, so cancellation cannot interrupt it. The slot is
    free when the worker has answered (`await session.ended()`).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        label: str | None,
        history: Sequence[dict[str, Any]] | None,
        wait: bool,
        deadline: float = math.inf,
    ) -> None:
        self.label = label
        self.id: int | None = None  # minted when entered
        self.end_cause: Cause | None = None
        self._engine = engine
        self._gate = engine.gate
        self._initial_history = history
        self._wait = wait
        self._deadline = deadline  # of the admission
        self._entered = False
        self._lifecycle = SessionLifecycle()
        self._link: Link | None = None  # of the attachment
        self._held: TokenIds = token_ids()  # what the attachment is known to hold
        self._generation: Generation | None = None  # its request, until it is settled
        self._released = trio.Event()
        self._wake = trio.Event()  # for the task: a deadline was set, or the end has come
        self._conversation: Conversation | None = None

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label is not None else ""
        return f"<Session {self.id}{label} {self.phase.value} {self._lifecycle.attachment.value}>"

    @property
    def phase(self) -> Phase:
        return self._lifecycle.phase

    @property
    def attached(self) -> bool:
        """Whether the worker holds the session."""
        return self._lifecycle.attachment is Attachment.ATTACHED

    @property
    def generation(self) -> Generation | None:
        """The request in flight, if any."""
        return self._generation

    @property
    def history(self) -> list[dict[str, Any]]:
        """The committed conversation, as chat messages; empty for one of raw token ids."""
        return self._committed.history

    @property
    def _committed(self) -> Conversation:
        if self._conversation is None:
            raise RuntimeError("the session was not entered: use `async with engine.open_session()`")
        return self._conversation

    # ---- the handle -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Session:
        if self._entered:
            raise RuntimeError("a session is entered once")
        self._entered = True
        session_id = await self._gate.admit(self._gate.admit_session, wait=self._wait, deadline=self._deadline)
        try:
            self._conversation = Conversation(self._engine.tokenizer, self._initial_history)
        except BaseException:
            self._gate.free_session()
            raise
        self.id = session_id
        self._engine.adopt(self)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool = False,
    ) -> Generation:
        """A request, to be entered. `prompt` is a user message, chat messages, or token ids.

        `timeout` in seconds runs from this call to the outcome, and aborts. With `wait` the request waits (within
        `timeout`) where the engine restarts or is full, instead of raising EngineOverloaded. Entering raises
        SessionBusy while another request runs, SessionEnded, EngineClosed, and RequestRejected for a bad prompt.
        """
        deadline = deadline_after(timeout)
        return self.generate_until(deadline, prompt, params, keep_partial=keep_partial, wait=wait)

    def generate_until(
        self,
        deadline: float,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        wait: bool = False,
    ) -> Generation:
        """`generate` with the moment, on trio's clock, instead of a timeout."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            shown = type(params).__name__
            raise RequestRejected("invalid_value", f"params must be SamplingParams, got {shown}", param="params")
        return Generation(self, prompt, params, keep_partial=keep_partial, deadline=deadline, wait=wait)

    def replace_history(self, messages: Sequence[dict[str, Any]]) -> None:
        """Make these messages the conversation. Raises SessionBusy while a request runs, RequestRejected if bad."""
        self._check_idle()
        self._committed.replace(messages)

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """End the session; harmless when it has ended. Posts END_SESSION in the same step if the worker holds it."""
        if self.id is None:
            return
        if self.end_cause is None:
            self.end_cause = cause
        if self._generation is not None:
            self._cut_short(self._generation, cause)
        self._apply(Event.END)
        self._wake.set()
        self._gate.notify()  # a request of ours may wait there

    async def ended(self) -> None:
        """Wait until the worker has let go of the session and its slot is free; at once if it never was entered."""
        if self.id is not None:
            await self._released.wait()

    # ---- the task -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The session's task: it keeps the request's deadline, and its scope is the session's life."""
        try:
            while self.end_cause is None:
                generation = self._generation
                with trio.move_on_at(math.inf if generation is None else generation.deadline) as scope:
                    await self._wake.wait()
                if scope.cancelled_caught and generation is not None:
                    self.abort_request(generation, Cause.TIMEOUT)
                    generation.deadline = math.inf
                if self.end_cause is None:
                    self._wake = trio.Event()
        except Exception as exc:
            self.crash(exc)
        finally:
            self.end(Cause.SHUTDOWN)

    # ---- a request: reserve, prepare, commit ----------------------------------------------------------------------

    async def start(self, generation: Generation) -> None:
        """Generation.__aenter__."""
        with generation.entering:
            with trio.move_on_at(generation.deadline):
                while self.phase is Phase.STOPPING and self._generation is not None:
                    await self._generation.settled.wait()
            if self.phase is Phase.STOPPING:
                self.abort_request(generation, Cause.TIMEOUT)
                return
            reserve = partial(self._reserve, generation)
            await self._gate.admit(reserve, wait=generation.wait, deadline=generation.deadline)
            try:
                await self._prepare(generation)
                await self._commit_when_open(generation)
            except Exception as exc:
                self._refuse(generation, exc)
                raise
            except BaseException:
                self.abort_request(generation, Cause.CLIENT)
                raise

    def _check_idle(self) -> None:
        if self.id is None:
            raise RuntimeError("the session was not entered: use `async with engine.open_session()`")
        if self.end_cause is Cause.SHUTDOWN:
            raise EngineClosed("the engine is closed")
        if self.end_cause is not None:
            raise SessionEnded(f"the session has ended ({self.end_cause.value})", cause=self.end_cause.value)
        if self.phase is not Phase.IDLE:
            raise SessionBusy(f"the session is busy: its request is {self.phase.value}")

    def _reserve(self, generation: Generation) -> int:
        if generation.outcome is not None:
            return generation.request_id  # aborted while it waited
        self._check_idle()
        generation.request_id = self._gate.admit_request()
        self._generation = generation
        self._apply(Event.RESERVE)
        self._wake.set()
        return generation.request_id

    async def _prepare(self, generation: Generation) -> None:
        prompt = generation.prompt
        if self._generation is not generation or prompt is None:
            return  # aborted while it waited
        generation.prompt = None
        limit = self._engine.limits.max_model_len
        self._committed.check_length(prompt, limit)
        if prompt_length(prompt) + self._committed.size > THREAD_THRESHOLD:
            prepared = await self._engine.ports.run_in_thread(self._committed.prepare, prompt)
        else:
            await trio.lowlevel.checkpoint()
            prepared = self._committed.prepare(prompt)
        self._check_prepared(prepared, generation.params)
        generation.prepared = prepared
        model = self._engine.model
        generation.answer = Answer(model.tokenizer, generation.params, model.eos_token_ids)

    def _check_prepared(self, prepared: Prepared, params: SamplingParams) -> None:
        limit = self._engine.limits.max_model_len
        if len(prepared.token_ids) >= limit:
            raise RequestRejected(
                "context_length_exceeded",
                f"prompt: {len(prepared.token_ids)} tokens leave no room for an answer in a context of {limit}",
                param="prompt",
            )
        vocab_size = self._engine.limits.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= vocab_size:
                    raise RequestRejected(
                        "invalid_value",
                        f"{name}: token {token_id} is beyond the vocabulary of {vocab_size}",
                        param=name,
                    )

    async def _commit_when_open(self, generation: Generation) -> None:
        while True:
            try:
                return self._commit(generation)
            except EngineOverloaded:
                if not generation.wait:
                    raise
            await self._gate.changed()

    def _commit(self, generation: Generation) -> None:
        if self._generation is not generation:
            return  # aborted in the meantime
        link = self._gate.committing_link()
        prepared = generation.prepared
        assert prepared is not None, "commit follows prepare"
        base = _common_prefix(self._held, prepared.token_ids)
        message = AddMessage(
            session=self._id,
            request=generation.request_id,
            base=base,
            token_ids=prepared.token_ids[base:],
            params=self._resolved(generation.params, len(prepared.token_ids)),
            eos_token_ids=tuple(self._engine.model.eos_token_ids),
        )
        try:
            link.check_size(message)
        except FrameTooLarge as exc:
            raise RequestRejected("too_large", str(exc), param="prompt") from exc
        self._link = link
        self._apply(Event.COMMIT, message=message)
        self._held = self._held[:base]
        self._held.extend(message.token_ids)
        self._move(generation, Stand.WAITING)

    def _resolved(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """With max_tokens within the context, and a seed."""
        room = self._engine.limits.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._engine.ports.mint_seed() if params.seed is None else params.seed
        return dataclasses.replace(
            params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens), seed=seed, stop=()
        )

    def _refuse(self, generation: Generation, error: Exception) -> None:
        if self._generation is generation and self.phase is Phase.PREPARING:
            typed = error if isinstance(error, EngineError) else EngineError(f"preparing failed: {error!r}")
            generation.decide(Outcome(FinishReason.ERROR, error=typed))
            self._apply(Event.REFUSE)

    # ---- the request's reader -------------------------------------------------------------------------------------

    def abort_request(self, generation: Generation, cause: Cause) -> None:
        """Abort this request if it has no outcome yet; a finish on its way wins, and the first cause."""
        if generation.outcome is not None:
            return
        if self._generation is generation:
            if self.phase in (Phase.PREPARING, Phase.RUNNING):
                generation.abort_cause = cause
            self._apply(Event.ABORT)
        else:  # it waits to be admitted: the books know nothing of it
            generation.request_id = self._gate.mint()
            generation.decide(Outcome(FinishReason.ABORT, cause))
            generation.settled.set()
            generation.entering.cancel()

    def leave(self, generation: Generation) -> None:
        """The reader goes: without an outcome, the turn is taken back (or kept in part) at once."""
        if self._generation is not generation or generation.outcome is not None:
            return
        self._cut_short(generation, generation.abort_cause)
        self._apply(Event.ABORT)

    def _cut_short(self, generation: Generation, cause: Cause) -> None:
        """Nothing more is read of this request: without an outcome it is aborted now, with what came until now."""
        if generation.outcome is not None:
            return
        generation.decide(Outcome(FinishReason.ABORT, cause))
        if generation.answer is not None:
            generation.answer.flush()  # what a stop string or a character still held back belongs to these tokens
        if generation.keep_partial:
            self._commit_turn(generation)

    def _commit_turn(self, generation: Generation) -> None:
        prepared, answer = generation.prepared, generation.answer
        if prepared is not None and answer is not None and answer.token_ids:
            self._committed.commit(prepared, answer.token_ids, answer.text)

    # ---- what the worker says -------------------------------------------------------------------------------------

    def on_row(self, row: TokensRow) -> None:
        """A row of a step."""
        self._held.extend(row.token_ids)
        generation = self._in_flight()
        if generation.stand is Stand.WAITING:
            self._move(generation, Stand.RUNNING)
        if row.usage is not None:
            generation.usage = row.usage
        if generation.outcome is None:
            if generation.receive(row):
                self._commit_turn(generation)
                generation.decide(Outcome(FinishReason.STOP))
                if row.finish_reason is None and self.phase is Phase.RUNNING:
                    self._apply(Event.ABORT)
            elif row.finish_reason is not None:
                self._finish(generation, row.finish_reason)
        if row.finish_reason is not None:
            self._apply(Event.FINISH)

    def on_failed(self, message: RequestFailed) -> None:
        """REQUEST_FAILED."""
        generation = self._in_flight()
        generation.decide(Outcome(FinishReason.ERROR, error=RequestRejected(message.code, message.message)))
        self._apply(Event.FINISH)

    def on_ended(self) -> None:
        """SESSION_ENDED."""
        self._apply(Event.SESSION_ENDED)

    def on_worker_lost(self, error: WorkerLost) -> None:
        """The incarnation is dead. A request in flight fails, unless it was being aborted; the history stays."""
        generation = self._generation
        if generation is not None and self.phase is Phase.RUNNING:
            generation.decide(Outcome(FinishReason.ERROR, error=error))
        self._apply(Event.WORKER_LOST)
        self._link = None
        self._held = token_ids()

    def crash(self, error: Exception) -> None:
        """A bug in this session's handling: it ends, as an error, and disturbs nobody else."""
        logger.error("session %s crashed and ends", self.id, exc_info=error)
        if self._generation is not None:
            failure = EngineError(f"the session crashed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._generation.decide(Outcome(FinishReason.ERROR, error=failure))
        self.end(Cause.ERROR)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        if reason is FinishReason.ABORT:
            if generation.keep_partial:
                self._commit_turn(generation)
            generation.decide(Outcome(reason, generation.abort_cause))
        else:
            self._commit_turn(generation)
            generation.decide(Outcome(reason))

    def _in_flight(self) -> Generation:
        assert self._generation is not None, "every state with a request in the table has its generation"
        return self._generation

    # ---- the actions ----------------------------------------------------------------------------------------------

    def _apply(self, event: Event, *, message: AddMessage | None = None) -> None:
        for action in self._lifecycle.apply(event):
            match action:
                case Action.POST_ADD_SESSION:
                    self._attached_link.post(AddSession(self._id))
                    self._held = token_ids()
                case Action.POST_ADD_MESSAGE:
                    assert message is not None, "only a commit posts a message"
                    self._attached_link.post(message)
                case Action.POST_STOP_SESSION:
                    self._attached_link.post(StopSession(self._id, self._in_flight().request_id))
                case Action.POST_END_SESSION:
                    self._attached_link.post(EndSession(self._id))
                case Action.FREE_SESSION:
                    self._engine.release(self)
                    self._released.set()
                case _:
                    self._settle()

    def _settle(self) -> None:
        """The request is over for the worker, too; undecided, it was aborted."""
        generation = self._in_flight()
        if generation.outcome is None:
            self._finish(generation, FinishReason.ABORT)
        assert generation.outcome is not None, "just decided"
        self._gate.ledger.settle(generation.stand, generation.outcome.finish_reason)
        if generation.outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._engine.request_finished()
        self._generation = None
        generation.entering.cancel()
        generation.settled.set()
        self._gate.notify()

    def _move(self, generation: Generation, stand: Stand) -> None:
        self._gate.ledger.move(generation.stand, stand)
        generation.stand = stand

    @property
    def _id(self) -> int:
        assert self.id is not None, "only an entered session has transitions"
        return self.id

    @property
    def _attached_link(self) -> Link:
        assert self._link is not None, "the table posts only while attached"
        return self._link


def _common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many tokens the two begin with in common."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    low, high = 0, length  # left[:low] is common, left[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle)
    return low
