"""A session as an actor: its conversation, its one request at a time, and its life on the worker.

The table in `core.lifecycle` decides; this class carries its actions out. All transitions are synchronous. They change
the session, its request and the ledger; everything that concerns others (messages to the worker, slots that are free)
is added to the engine's effects. Every public method that a user, a reader or the session's task calls drains them;
methods for the worker's messages leave that to the dispatcher, which drains once for all rows of a step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

import trio

from trioengine.actors.attachment import WorkerAttachment
from trioengine.actors.effects import Effects
from trioengine.actors.gate import Gate
from trioengine.actors.images import HeldPayloads, ImageStore, RequestImages, find_dropped
from trioengine.actors.link import Link
from trioengine.actors.observer import Observer
from trioengine.actors.request import Request
from trioengine.actors.request_times import StepTimes
from trioengine.actors.session_opening import SessionOpening
from trioengine.core.checks import check_label
from trioengine.core.errors import EngineError, Outcome, RequestRejected, SessionBusy, session_error
from trioengine.core.ledger import RequestState
from trioengine.core.lifecycle import Action, Event, Phase, SessionLifecycle
from trioengine.core.messages import Adapter, AddMessage, RequestFailed, TokensRow
from trioengine.core.sampling_params import Overflow, check_overflow
from trioengine.core.types import Cause, FinishReason
from trioengine.text.conversation import Conversation

logger = logging.getLogger("trioengine")
SETTLING = (Action.SETTLE_AS_REPORTED, Action.SETTLE_ABORTED, Action.SETTLE_REFUSED, Action.SETTLE_LOST)
_NOT_ENTERED = "the session was not entered: use `async with engine.open_session()`"


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """Effect: the first row of an attachment came; `is_answer` is False if it is an abort, or the request is over."""

    session: SessionActor
    request: Request
    is_answer: bool


@dataclass(frozen=True, slots=True)
class RequestSettled:
    """Effect: the request is over for the worker as well; its slot is free."""

    session: SessionActor
    request: Request


@dataclass(frozen=True, slots=True)
class SessionFreed:
    """Effect: the session has ended, and the worker has let go of it; its slot is free."""

    session: SessionActor


class SessionActor:
    """The state of one session, and its transitions."""

    __slots__ = (
        "_attachment",
        "_conversation",
        "_effects",
        "_gate",
        "_held_payloads",
        "_observers",
        "_suspended_images",
        "end_cause",
        "id",
        "label",
        "lifecycle",
        "opening",
        "overflow",
        "released",
        "request",
        "retention_ratio",
        "task_wake",
        "waiting",
    )

    def __init__(
        self,
        gate: Gate,
        effects: Effects,
        images: ImageStore,
        observers: Sequence[Observer],
        *,
        opening: SessionOpening,
        label: str | None = None,
        overflow: Overflow = "refuse",
        adapter: Adapter | None = None,
    ) -> None:
        self.id: int | None = None  # minted when the session gets its slot
        self.opening = opening
        self.label = check_label(label)
        self.overflow = check_overflow(overflow)  # of the requests that follow, as the next
        self.retention_ratio = 1.0  # of the limit, to which a chat over it is shortened
        self.request: Request | None = None  # in flight, until it is settled
        self.waiting: dict[Request, None] = {}  # requests on their way in, in their order
        self.end_cause: Cause | None = None
        self.released = trio.Event()
        self._attachment = WorkerAttachment(effects, observers, adapter, self.crash)
        self._gate = gate
        self._effects = effects
        self._observers = observers
        self.lifecycle = SessionLifecycle()
        self._conversation: Conversation | None = None
        self._held_payloads = HeldPayloads()
        self._suspended_images = RequestImages(images)  # pinned while the request is suspended
        self.task_wake = trio.Event()  # for its task, which replaces it: a request has a deadline, or the end has come

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label is not None else ""
        if self.id is None:
            return f"<Session{label} {'without a slot' if self.opening.is_entered else 'not entered'}>"
        return f"<Session {self.id}{label} {self.phase.value} {self.lifecycle.attachment.value}>"

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.lifecycle.phase

    @property
    def is_open(self) -> bool:
        """Whether the session was entered to the end."""
        return self._conversation is not None

    @property
    def conversation(self) -> Conversation:
        """The committed turns. Raises RuntimeError before the session is entered."""
        if self._conversation is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._conversation

    @property
    def requests(self) -> list[Request]:
        """The request in flight, and those on their way in."""
        in_flight = [] if self.request is None or self.request in self.waiting else [self.request]
        return [*in_flight, *self.waiting]

    def check_idle(self) -> None:
        """Raise SessionEnded or SessionBusy, unless the session could run a request."""
        self.check_open()
        if self.phase is not Phase.IDLE:
            raise SessionBusy(f"the session is busy: its request is {self.phase.value}; await its answer, or abort it")

    def check_open(self) -> None:
        """Raise RuntimeError before the session has a slot, SessionEnded or EngineClosed once it has ended."""
        if self.id is None:
            raise RuntimeError(_NOT_ENTERED)
        if self.end_cause is not None:
            raise self.ended_error()

    def ended_error(self) -> EngineError:
        """The error of a session that has ended."""
        assert self.end_cause is not None, "it has ended"
        return session_error(self.end_cause)

    # ---- its beginning and its end ----------------------------------------------------------------------------------

    def begin(self, conversation: Conversation) -> None:
        """The session is open."""
        self._conversation = conversation
        self.hold_payloads()

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """End the session; harmless when it has ended. Posts END_SESSION in the same step if the worker holds it.

        A task that is entering it gets SessionEnded.
        """
        if self.id is None:
            self._end_opening(cause)
            return
        if self.end_cause is None:
            self.end_cause = cause
        if (request := self.request) is not None:
            is_aborted = self.phase is Phase.STOPPING  # and its own cause, the first one, counts
            request.cut_short(request.abort_cause if is_aborted else cause, self._conversation)
        self._apply(Event.END)
        self.hold_payloads()
        self.task_wake.set()
        if self._conversation is None:
            self.opening.scope.cancel()  # it may wait for room for the images in its history
        for request in self.waiting:
            request.entering.cancel()
        self._effects.drain()

    def _end_opening(self, cause: Cause) -> None:
        if self.opening.is_under_way:
            self.end_cause = cause
            self.opening.scope.cancel()

    def crash(self, error: Exception) -> None:
        """End this session, as an error, for a bug in its handling; no other session is affected."""
        logger.error("session %s crashed and ends", self.id, exc_info=error)
        if self.request is not None:
            failure = EngineError(f"the session crashed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.request.set_outcome(Outcome(FinishReason.ERROR, error=failure))
        self.end(Cause.ERROR)

    def attempt(self, transition: Callable[..., None], *args: object) -> None:
        """Call a transition of this session; an exception in it is a bug, and ends the session."""
        try:
            transition(*args)
        except Exception as exc:
            self.crash(exc)

    # ---- a request on its way in ------------------------------------------------------------------------------------

    def reserve(self, request: Request) -> None:
        """Take a request slot. Raises the reason if this request cannot have one."""
        if request.outcome is not None:
            return  # aborted while it waited
        self.check_idle()
        request.id = self._gate.admit_request()
        self.request = request
        self._apply(Event.RESERVE)
        if request.deadline.at < math.inf:
            self.task_wake.set()

    def commit(self, request: Request, link: Link) -> None:
        """Hand the prepared request to the worker."""
        assert request.prepared is not None, "commit follows prepare"
        self._attach(Event.COMMIT, request, link, self._attachment.num_held(request.prepared.token_ids))

    def refuse(self, request: Request, error: Exception) -> None:
        """The request gets no slot, or its preparation failed."""
        if self.request is request and self.phase is Phase.PREPARING:
            typed = copy(error) if isinstance(error, EngineError) else EngineError(f"preparing failed: {error!r}")
            # a copy: the error itself has a traceback, whose frames have the request, and the bytes of a bad image
            request.set_outcome(Outcome(FinishReason.ERROR, error=typed))
            self._apply(Event.REFUSE)
            self._effects.drain()
        elif request.outcome is None:
            self._gate.ledger.reject()

    # ---- aborts -----------------------------------------------------------------------------------------------------

    def abort_request(self, request: Request, cause: Cause) -> bool:
        """Abort this request if it has no outcome yet; a finish on its way wins, and the first cause.

        Returns whether this call aborts it: False where it has an outcome, or was aborted before.
        """
        if request.outcome is not None:
            return False
        if self.request is request:
            is_first = self.phase in (Phase.PREPARING, Phase.RUNNING, Phase.SUSPENDED)
            if is_first:
                request.abort_cause = cause
            self._apply(Event.ABORT)
            self._effects.drain()
            return is_first
        request.id = self._gate.mint()
        request.set_outcome(Outcome(FinishReason.ABORT, cause))
        if request in self.waiting:  # else it was not entered: the ledger does not have it
            self._gate.ledger.leave_line(cause)
        request.set_settled()
        return True

    def abort_waiting(self, cause: Cause) -> int:
        """Abort the calls that wait for a slot: requests, and the session's own opening. Returns how many requests."""
        if self.id is None:
            self._end_opening(cause)
        waiting = [request for request in self.waiting if request is not self.request]
        return sum(self.abort_request(request, cause) for request in waiting)

    def leave(self, request: Request) -> None:
        """The reader goes: without an outcome the turn is taken back (or kept in part) at once."""
        if self.request is not request or request.outcome is not None:
            return
        request.cut_short(request.abort_cause, self._conversation)
        self._apply(Event.ABORT)
        self._effects.drain()

    # ---- messages of the worker; the dispatcher drains --------------------------------------------------------------

    def on_row(self, row: TokensRow, step: StepTimes) -> None:
        """A row of a step."""
        self._attachment.receive(row.token_ids)
        request = self._in_flight()
        if row.prompt_logprobs is not None and not request.receive_prompt(row, row.prompt_logprobs):
            return  # the answer has not begun
        if request.state is not RequestState.RUNNING:  # the first row of this attachment's answer
            self._begin_answer(request, row)
        if request.outcome is None:
            request.usage = row.usage if request.usage is None else request.usage
            if (outcome := request.receive(row, step)) is not None:
                request.conclude(outcome, self._conversation)
                if row.finish_reason is None and self.phase in (Phase.RUNNING, Phase.SUSPENDED):
                    self._apply(Event.ABORT)
        if row.finish_reason is not None:
            self._finish()

    def _begin_answer(self, request: Request, row: TokensRow) -> None:
        if request.state is RequestState.WAITING:
            self._move(request, RequestState.RUNNING)
        is_answer = row.finish_reason is not FinishReason.ABORT and request.outcome is None
        self._effects.append(AnswerBegan(self, request, is_answer))

    def on_failed(self, message: RequestFailed) -> None:
        """REQUEST_FAILED."""
        self._in_flight().fail(message)
        self._finish()

    def _finish(self) -> None:
        """The worker has finished with the request; after an END_SESSION, SESSION_ENDED follows."""
        if self.lifecycle.is_open_on_worker:
            self._attachment.report_stop()
        self._apply(Event.FINISH)

    def on_ended(self) -> None:
        """SESSION_ENDED: the worker has dropped everything of the session."""
        self._apply(Event.SESSION_ENDED)
        self._attachment.drop()

    def on_worker_lost(self) -> None:
        """The incarnation is dead. A request in flight is suspended, unless it was being aborted; the history stays."""
        self._apply(Event.WORKER_LOST)
        self._attachment.drop()

    # ---- requests that outlive an attachment ------------------------------------------------------------------------

    def detach(self) -> None:
        """Take the session off the worker; a request in flight is suspended."""
        self._apply(Event.DETACH)

    def resume(self, link: Link) -> None:
        """Let the suspended request go on: the worker computes the prompt and the delivered part of the answer again.

        The request fails if an image of its prompt was dropped meanwhile.
        """
        request = self._in_flight()
        if (dropped := find_dropped(request.images)) is not None:
            self.give_up(dropped)
            return
        self._attach(Event.RESUME, request, link, 0)
        self._suspended_images.unpin()

    def give_up(self, error: EngineError) -> None:
        """Fail the suspended request."""
        self._in_flight().set_outcome(Outcome(FinishReason.ERROR, error=error))
        self._apply(Event.GIVE_UP)

    # ---- transitions ------------------------------------------------------------------------------------------------

    def _attach(self, event: Event, request: Request, link: Link, num_held: int) -> None:
        assert self.id is not None, "only a session with a slot has transitions"
        self._attachment.begin(link)
        self._apply(event, request.message(self.id, num_held, self._gate.mint))
        self.hold_payloads()
        self._move(request, RequestState.WAITING)

    def _apply(self, event: Event, message: AddMessage | None = None) -> None:
        assert self.id is not None, "only a session with a slot has transitions"
        phase, attachment = self.lifecycle.phase, self.lifecycle.attachment
        actions = self.lifecycle.apply(event)
        for observer in self._observers:
            observer.session_moved(self, phase, attachment, event)
        for action in actions:
            match action:
                case Action.FREE_SESSION:
                    self._effects.append(SessionFreed(self))
                case Action.SUSPEND:
                    self._suspend()
                case _ if action in SETTLING:
                    self._settle()
                case _:
                    self._attachment.carry_out(action, self.id, self.request, message)

    def _suspend(self) -> None:
        """The request waits for a worker, and its images with it: they are not dropped to make room for others."""
        request = self._in_flight()
        self._move(request, RequestState.SUSPENDED)
        with suppress(RequestRejected):  # one was dropped before: refused when the request would go on
            self._suspended_images.pin(request.images)

    def _settle(self) -> None:
        """The request is over for the worker as well; without an outcome it was aborted."""
        request = self._in_flight()
        self._suspended_images.unpin()
        request.cut_short(request.abort_cause, self._conversation)
        outcome = request.outcome
        assert outcome is not None, "just decided"
        self.request = None
        self.hold_payloads()
        self._gate.ledger.settle(request.state, outcome.finish_reason, outcome.cause)
        request.set_settled()
        self._effects.append(RequestSettled(self, request))

    def _move(self, request: Request, state: RequestState) -> None:
        self._gate.ledger.move(request.state, state)
        request.state = state

    def _in_flight(self) -> Request:
        assert self.request is not None, "every state with a request in the table has its request"
        return self.request

    def hold_payloads(self) -> None:
        """Hold the payloads of the conversation and of the request in flight, and no others; none after the end."""
        in_flight = self.request.images if self.request is not None else ()
        committed = self._conversation.images if self._conversation is not None else ()
        if self.phase is Phase.ENDED:
            in_flight, committed = (), ()
        if in_flight or committed or self._held_payloads.payloads:
            self._held_payloads.replace([*committed, *(placed.image for placed in in_flight)])
