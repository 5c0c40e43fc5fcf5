"""A session as its table moves it: what the worker says of it, what each action does, and which turns are kept.

All of it is synchronous. The table in `core.lifecycle` says what happens; here it is carried out.
"""

from __future__ import annotations

import abc
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING

from trioengine.actors.generation import Generation
from trioengine.actors.images import RequestImages, find_dropped, image_inputs, payload_of
from trioengine.actors.link import Link
from trioengine.actors.payload import Payload
from trioengine.actors.worker_session import Posting, WorkerSession
from trioengine.aio.calls import AsyncOnly
from trioengine.core.errors import EngineError, Outcome, RequestRejected, SamplingFailed
from trioengine.core.ledger import RequestState
from trioengine.core.lifecycle import Action, Attachment, Event, Phase, SessionLifecycle
from trioengine.core.messages import SAMPLING_FAILED, AddMessage, RequestFailed, TokensRow
from trioengine.core.types import Cause, FinishReason
from trioengine.text.conversation import Conversation

if TYPE_CHECKING:
    from trioengine.actors.engine_state import EngineState


class SessionState(AsyncOnly, abc.ABC):
    """Base class of Session: applies the transitions of the lifecycle table."""

    __slots__ = (
        "__weakref__",
        "_conversation",
        "_engine",
        "_gate",
        "_lifecycle",
        "_payloads",
        "_suspended_images",
        "generation",
        "id",
        "observers",
        "worker_session",
    )

    _noun = "a session"
    _usage = "use `async with engine.open_session() as session`"

    def __init__(self, engine: EngineState) -> None:
        self.id: int | None = None  # minted when entered
        self.generation: Generation | None = None  # its request, until it is settled
        self.observers = engine.observers
        self.worker_session = WorkerSession(engine.observers)
        self._engine = engine
        self._gate = engine.gate
        self._lifecycle = SessionLifecycle()
        self._conversation: Conversation | None = None
        self._payloads: tuple[Payload, ...] = ()  # held: of the conversation, and of the request in flight
        self._suspended_images = RequestImages(engine)  # pinned while the request is suspended

    @abc.abstractmethod
    def _free(self) -> None:
        """The worker has let go of the session: give its slot back."""

    @property
    def phase(self) -> Phase:
        return self._lifecycle.phase

    @property
    def request_id(self) -> int:
        """Of its request, which it has."""
        return self._in_flight().request_id

    @property
    def attached(self) -> bool:
        """Whether the worker holds the session; it may have been told to end it."""
        return self._lifecycle.attachment is not Attachment.DETACHED

    @property
    def is_open_on_worker(self) -> bool:
        """Whether the worker holds the session, and was not told to end it."""
        return self._lifecycle.attachment is Attachment.ATTACHED

    @property
    def is_detaching(self) -> bool:
        """Whether the worker was told to end the session, and has not answered yet: it takes no request meanwhile."""
        return self._lifecycle.attachment is Attachment.DETACHING

    @property
    def conversation(self) -> Conversation:
        """What was committed."""
        if self._conversation is None:
            raise RuntimeError("the session was not entered: use `async with engine.open_session()`")
        return self._conversation

    # ---- a request that was prepared, or could not be ---------------------------------------------------------------

    def commit(self, generation: Generation, posting: Posting) -> None:
        """Hand the prepared request to the worker."""
        generation.resolved = posting.message.params
        self.worker_session.attach(posting.link)
        self._apply(Event.COMMIT, posting=posting)
        self.hold_payloads()
        self._move(generation, RequestState.WAITING)

    def refuse(self, generation: Generation, error: Exception) -> None:
        """It gets no slot, or its preparation failed."""
        if self.generation is generation and self.phase is Phase.PREPARING:
            typed = copy(error) if isinstance(error, EngineError) else EngineError(f"preparing failed: {error!r}")
            # a copy: the error itself has a traceback, whose frames have the generation, and the bytes of a bad image
            generation.decide(Outcome(FinishReason.ERROR, error=typed))
            self._apply(Event.REFUSE)
        elif generation.outcome is None:
            self._gate.ledger.reject()

    # ---- what the worker says -------------------------------------------------------------------------------------

    def on_row(self, row: TokensRow, now: float) -> None:
        """A row of a step, which came at `now`."""
        self.worker_session.receive(row.token_ids)
        generation = self._in_flight()
        is_next = generation.stand is RequestState.RUNNING  # after another one of the same attachment
        if generation.stand is RequestState.WAITING:
            self._move(generation, RequestState.RUNNING)
        if not is_next and row.token_ids and generation.outcome is None:
            generation.note_weights(self._engine.weights.version)
            self._engine.reset_deaths()
        if generation.usage is None and generation.outcome is None:
            generation.usage = row.usage
        if generation.outcome is None and (outcome := generation.receive(row, now)) is not None:
            self._conclude(generation, outcome)
            if row.finish_reason is None and self.phase in (Phase.RUNNING, Phase.SUSPENDED):
                self._apply(Event.ABORT)
        if row.finish_reason is not None:
            self._finish()
        if not is_next:
            self._engine.replays.on_progress(self, generation)

    def tell_reader(self) -> None:
        """All rows of the step are where they belong: what is done with them may take a while."""
        if self.generation is not None:
            self.generation.tell_reader()

    def on_failed(self, message: RequestFailed) -> None:
        """REQUEST_FAILED."""
        generation = self._in_flight()
        is_ours = message.code == SAMPLING_FAILED
        error = SamplingFailed(message.message) if is_ours else RequestRejected(message.code, message.message)
        generation.decide(Outcome(FinishReason.ERROR, error=error))
        self._finish()

    def _finish(self) -> None:
        """The worker is done with the request; one that was told to end has still to say so of the session."""
        if self.is_open_on_worker:
            self.worker_session.let_go()
        self._apply(Event.FINISH)

    def on_ended(self) -> None:
        """SESSION_ENDED: what the worker held is gone."""
        self.worker_session.detach()
        self._apply(Event.SESSION_ENDED)

    def on_worker_lost(self) -> None:
        """The incarnation is dead. A request in flight is suspended, unless it was being aborted; the history stays."""
        self._apply(Event.WORKER_LOST)
        self.worker_session.detach()

    # ---- requests that outlive an attachment ----------------------------------------------------------------------

    def detach(self) -> None:
        """The worker is to forget the session; a request in flight is suspended."""
        self._apply(Event.DETACH)

    def resume(self, link: Link) -> None:
        """Let a suspended request go on: the worker computes again what it was given before."""
        generation = self._in_flight()
        prepared, answer, params = generation.prepared, generation.answer, generation.resolved
        assert prepared is not None and answer is not None and params is not None, "it was committed"
        if (dropped := find_dropped(prepared.images)) is not None:
            self.give_up(dropped)
            return
        ids = prepared.token_ids[:]
        ids.extend(answer.token_ids)
        message = AddMessage(
            session=self._id,
            request=generation.request_id,
            base=0,
            token_ids=ids,
            params=params,
            eos_token_ids=tuple(self._engine.model.eos_token_ids),
            num_output=len(answer.token_ids),
            images=image_inputs(prepared.images, params.cache_salt, self._gate.mint),
        )
        posting = Posting.of(link, message, prepared.images)
        self.worker_session.attach(link)
        self._apply(Event.RESUME, posting=posting)
        self._suspended_images.unpin()
        self._move(generation, RequestState.WAITING)

    def give_up(self, error: EngineError) -> None:
        """A suspended request does not go on."""
        self._in_flight().decide(Outcome(FinishReason.ERROR, error=error))
        self._apply(Event.GIVE_UP)

    # ---- the actions ----------------------------------------------------------------------------------------------

    def _apply(self, event: Event, *, posting: Posting | None = None) -> None:
        lifecycle = self._lifecycle
        phase, attachment = lifecycle.phase, lifecycle.attachment
        actions = lifecycle.apply(event)
        for observer in self.observers:
            observer.session_moved(self, phase, attachment, event)
        for action in actions:
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
                    self._free()
                case Action.SUSPEND:
                    self._suspend()
                case _:
                    self._settle()

    def _suspend(self) -> None:
        """The request waits for a worker, and its images with it: they make no room for others."""
        generation = self._in_flight()
        self._move(generation, RequestState.SUSPENDED)
        assert generation.prepared is not None, "it was committed"
        with suppress(RequestRejected):  # one was dropped before: refused when the request would go on
            self._suspended_images.pin(generation.prepared.images)

    def _settle(self) -> None:
        """The request is over for the worker, too; undecided, it was aborted."""
        self._suspended_images.unpin()
        generation = self._in_flight()
        self._cut_short(generation, generation.abort_cause)
        outcome = generation.outcome
        assert outcome is not None, "just decided"
        if outcome.is_complete:
            generation.tell_times()
        self.generation = None
        self.hold_payloads()
        generation.settle()
        self._engine.replays.on_progress(self, generation)
        self._gate.settle(generation.stand, outcome.finish_reason, outcome.cause)

    def _move(self, generation: Generation, stand: RequestState) -> None:
        self._gate.ledger.move(generation.stand, stand)
        generation.stand = stand

    @property
    def _id(self) -> int:
        assert self.id is not None, "only an entered session has transitions"
        return self.id

    # ---- images ----------------------------------------------------------------------------------------------------

    def hold_payloads(self) -> None:
        """Hold the payloads of the conversation and of the request in flight, and of nothing else; of none at the end.

        The conversation, or the request, has changed.
        """
        prepared = self.generation.prepared if self.generation is not None else None
        in_flight = prepared.images if prepared is not None else ()
        committed = self._conversation.images if self._conversation is not None else ()
        if not (self._payloads or in_flight or committed):
            return
        is_over = self.phase is Phase.ENDED
        images = () if is_over else (*committed, *(placed.image for placed in in_flight))
        before, self._payloads = self._payloads, tuple(dict.fromkeys(map(payload_of, images)))
        for payload in self._payloads:
            payload.hold()
        for payload in before:
            payload.release()

    # ---- the request, and its turn --------------------------------------------------------------------------------

    def _in_flight(self) -> Generation:
        assert self.generation is not None, "every state with a request in the table has its generation"
        return self.generation

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
