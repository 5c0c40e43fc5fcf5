"""A session: a conversation, its one request at a time, and its life on the worker.

All transitions are synchronous methods; the handle, the task and the link call them, and the first wins. The table in
`core.lifecycle` says what happens; here each action is carried out, and the conversation kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio

from trioengine.actors.admission import Admission
from trioengine.actors.deadline import deadline_after
from trioengine.actors.generation import Generation
from trioengine.actors.worker_session import Posting, WorkerSession
from trioengine.core.errors import EngineClosed, EngineError, RequestRejected, SessionBusy, SessionEnded, WorkerLost
from trioengine.core.ledger import Stand
from trioengine.core.lifecycle import Action, Attachment, Cause, Event, Outcome, Phase, SessionLifecycle
from trioengine.core.messages import FinishReason, RequestFailed, TokensRow
from trioengine.core.sampling_params import SamplingParams
from trioengine.text.conversation import Conversation, Prompt

if TYPE_CHECKING:
    from trioengine.actors.engine import Engine

logger = logging.getLogger("trioengine")


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
        self.generation: Generation | None = None  # its request, until it is settled
        self.observers = engine.observers
        self.worker_session = WorkerSession(engine.observers)
        self._engine = engine
        self._gate = engine.gate
        self._initial_history = history
        self._wait = wait
        self._deadline = deadline  # of the admission
        self._entered = False
        self._lifecycle = SessionLifecycle()
        self._waiting: set[Generation] = set()  # those on their way in
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
    def history(self) -> list[dict[str, Any]]:
        """The committed conversation, as chat messages; empty for one of raw token ids."""
        return self.conversation.history

    @property
    def conversation(self) -> Conversation:
        """What was committed."""
        if self._conversation is None:
            raise RuntimeError("the session was not entered: use `async with engine.open_session()`")
        return self._conversation

    # ---- the handle -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Session:
        if self._entered:
            raise RuntimeError("a session is entered once")
        self._entered = True
        await self._gate.admit(self._gate.sessions, self._open, wait=self._wait, deadline=self._deadline)
        try:
            self._conversation = Conversation(self._engine.tokenizer, self._initial_history)
        except BaseException:
            self.end()
            raise
        return self

    def _open(self) -> None:
        """Take a session slot, and begin."""
        self.id = self._gate.admit_session()
        self._engine.adopt(self)

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
        `timeout`, and in the order of arrival) where the engine restarts or is full, instead of raising
        EngineOverloaded; without it, it never gets ahead of those who wait. Entering raises SessionBusy while another
        request runs, SessionEnded, EngineClosed, and RequestRejected for a bad prompt.
        """
        deadline = deadline_after(timeout)
        return Generation(self, prompt, params, keep_partial=keep_partial, deadline=deadline, wait=wait)

    def replace_history(self, messages: Sequence[dict[str, Any]]) -> None:
        """Make these messages the conversation. Raises SessionBusy while a request runs, RequestRejected if bad."""
        self.check_idle()
        self.conversation.replace(messages)

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """End the session; harmless when it has ended. Posts END_SESSION in the same step if the worker holds it."""
        if self.id is None:
            return
        if self.end_cause is None:
            self.end_cause = cause
        if self.generation is not None:
            self._cut_short(self.generation, cause)
        self._apply(Event.END)
        self._wake.set()
        for generation in self._waiting:
            generation.entering.cancel()

    async def ended(self) -> None:
        """Wait until the worker has let go of the session and its slot is free; at once if it never was entered."""
        if self.id is not None:
            await self._released.wait()

    # ---- the task -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The session's task: it keeps the request's deadline, and its scope is the session's life."""
        try:
            while self.end_cause is None:
                generation = self.generation
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

    # ---- a request's way in ---------------------------------------------------------------------------------------

    async def start(self, generation: Generation) -> None:
        """Generation.__aenter__."""
        generation.times.begin()
        self._waiting.add(generation)
        try:
            await Admission(self._engine, self, generation).run()
        finally:
            self._waiting.discard(generation)

    def reserve(self, generation: Generation) -> None:
        """Take a request slot. Raises why there is none for this request."""
        if generation.outcome is not None:
            return  # aborted while it waited
        self.check_idle()
        generation.request_id = self._gate.admit_request()
        self.generation = generation
        self._apply(Event.RESERVE)
        self._wake.set()

    def commit(self, generation: Generation, posting: Posting) -> None:
        """Hand the prepared request to the worker."""
        self.worker_session.attach(posting.link)
        self._apply(Event.COMMIT, posting=posting)
        self._move(generation, Stand.WAITING)

    def refuse(self, generation: Generation, error: Exception) -> None:
        """Its preparation failed."""
        if self.generation is generation and self.phase is Phase.PREPARING:
            typed = error if isinstance(error, EngineError) else EngineError(f"preparing failed: {error!r}")
            generation.decide(Outcome(FinishReason.ERROR, error=typed))
            self._apply(Event.REFUSE)

    def check_idle(self) -> None:
        """Raise SessionEnded or SessionBusy, unless it could run a request."""
        if self.id is None:
            raise RuntimeError("the session was not entered: use `async with engine.open_session()`")
        if self.end_cause is Cause.SHUTDOWN:
            raise EngineClosed("the engine is closed")
        if self.end_cause is not None:
            raise SessionEnded(f"the session has ended ({self.end_cause.value})", cause=self.end_cause.value)
        if self.phase is not Phase.IDLE:
            raise SessionBusy(f"the session is busy: its request is {self.phase.value}")

    # ---- the request's reader -------------------------------------------------------------------------------------

    def abort_request(self, generation: Generation, cause: Cause) -> None:
        """Abort this request if it has no outcome yet; a finish on its way wins, and the first cause."""
        if generation.outcome is not None:
            return
        if self.generation is generation:
            if self.phase in (Phase.PREPARING, Phase.RUNNING):
                generation.abort_cause = cause
            self._apply(Event.ABORT)
        else:  # it waits to be admitted: the books know nothing of it
            generation.request_id = self._gate.mint()
            generation.decide(Outcome(FinishReason.ABORT, cause))
            generation.settle()

    def leave(self, generation: Generation) -> None:
        """The reader goes: without an outcome, the turn is taken back (or kept in part) at once."""
        if self.generation is not generation or generation.outcome is not None:
            return
        self._cut_short(generation, generation.abort_cause)
        self._apply(Event.ABORT)

    def _cut_short(self, generation: Generation, cause: Cause) -> None:
        """Nothing more is read of this request: without an outcome it is aborted now, with what came until now."""
        if generation.outcome is not None:
            return
        generation.flush()
        self._conclude(generation, Outcome(FinishReason.ABORT, cause))

    def _conclude(self, generation: Generation, outcome: Outcome) -> None:
        """The worker's answer, or an abort, decides the outcome, and whether the turn is committed."""
        prepared, answer = generation.prepared, generation.answer
        is_kept = outcome.finish_reason is not FinishReason.ABORT or generation.keep_partial
        if is_kept and prepared is not None and answer is not None and answer.token_ids:
            self.conversation.commit(prepared, answer.token_ids, answer.text)
        generation.decide(outcome)

    # ---- what the worker says -------------------------------------------------------------------------------------

    def on_row(self, row: TokensRow) -> None:
        """A row of a step."""
        self.worker_session.receive(row.token_ids)
        generation = self._in_flight()
        if generation.stand is Stand.WAITING:
            self._move(generation, Stand.RUNNING)
        if row.usage is not None:
            generation.usage = row.usage
        if generation.outcome is None and (outcome := generation.receive(row)) is not None:
            self._conclude(generation, outcome)
            if row.finish_reason is None and self.phase is Phase.RUNNING:
                self._apply(Event.ABORT)
        if row.finish_reason is not None:
            self._finish()

    def on_failed(self, message: RequestFailed) -> None:
        """REQUEST_FAILED."""
        generation = self._in_flight()
        generation.decide(Outcome(FinishReason.ERROR, error=RequestRejected(message.code, message.message)))
        self._finish()

    def _finish(self) -> None:
        """The worker is done with the request; one that was told to end has still to say so of the session."""
        if self.phase is not Phase.ENDING:
            self.worker_session.let_go()
        self._apply(Event.FINISH)

    def on_ended(self) -> None:
        """SESSION_ENDED."""
        self.worker_session.let_go()
        self._apply(Event.SESSION_ENDED)

    def on_worker_lost(self, error: WorkerLost) -> None:
        """The incarnation is dead. A request in flight fails, unless it was being aborted; the history stays."""
        generation = self.generation
        if generation is not None and self.phase is Phase.RUNNING:
            generation.decide(Outcome(FinishReason.ERROR, error=error))
        self._apply(Event.WORKER_LOST)
        self.worker_session.detach()

    def crash(self, error: Exception) -> None:
        """A bug in this session's handling: it ends, as an error, and disturbs nobody else."""
        logger.error("session %s crashed and ends", self.id, exc_info=error)
        if self.generation is not None:
            failure = EngineError(f"the session crashed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.generation.decide(Outcome(FinishReason.ERROR, error=failure))
        self.end(Cause.ERROR)

    def _in_flight(self) -> Generation:
        assert self.generation is not None, "every state with a request in the table has its generation"
        return self.generation

    # ---- the actions ----------------------------------------------------------------------------------------------

    def _apply(self, event: Event, *, posting: Posting | None = None) -> None:
        for action in self._lifecycle.apply(event):
            match action:
                case Action.POST_ADD_SESSION:
                    self.worker_session.add(self._id)
                case Action.POST_ADD_MESSAGE:
                    assert posting is not None, "only a commit posts a message"
                    self.worker_session.add_message(posting)
                case Action.POST_STOP_SESSION:
                    self.worker_session.stop(self._id, self._in_flight().request_id)
                case Action.POST_END_SESSION:
                    self.worker_session.end(self._id)
                case Action.FREE_SESSION:
                    self._engine.release(self)
                    self._released.set()
                case _:
                    self._settle()

    def _settle(self) -> None:
        """The request is over for the worker, too; undecided, it was aborted."""
        generation = self._in_flight()
        self._cut_short(generation, generation.abort_cause)
        outcome = generation.outcome
        assert outcome is not None, "just decided"
        if outcome.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            generation.tell_times()
            self._engine.request_finished()
        self.generation = None
        generation.settle()
        self._gate.settle(generation.stand, outcome.finish_reason, outcome.cause)

    def _move(self, generation: Generation, stand: Stand) -> None:
        self._gate.ledger.move(generation.stand, stand)
        generation.stand = stand

    @property
    def _id(self) -> int:
        assert self.id is not None, "only an entered session has transitions"
        return self.id
