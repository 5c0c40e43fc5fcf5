"""A session: a conversation, its one request at a time, and its life on the worker.

All transitions are synchronous methods; the handle, the task and the link call them, and the first wins. What they do
is in `session_state`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import trio

from trioengine.actors.admission import Admission
from trioengine.actors.generation import Generation
from trioengine.actors.image_parts import put_images
from trioengine.actors.images import RequestImages
from trioengine.actors.media import Media
from trioengine.actors.session_state import SessionState
from trioengine.aio.calls import whole_answer
from trioengine.aio.deadline import NEVER, Deadline, deadline_after
from trioengine.core.arguments import check_history, check_label, check_wait
from trioengine.core.errors import EngineClosed, EngineError, Outcome, SessionBusy, SessionEnded
from trioengine.core.lifecycle import Event, Phase
from trioengine.core.sampling_params import (
    Overflow,
    SamplingOptions,
    SamplingParams,
    check_overflow,
    merged_params,
    sampling_checked,
)
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.text.conversation import Conversation, Prompt

if TYPE_CHECKING:
    from trioengine.actors.engine_state import EngineState

logger = logging.getLogger("trioengine")


class Session(SessionState):
    """One session: `async with engine.open_session() as session`.

    Entering takes a session slot. Leaving, in whatever way, ends the session: a request in flight is aborted,
    END_SESSION is posted in the same step, and nothing is waited for, so cancellation cannot interrupt it. The slot is
    free when the worker has answered (`await session.ended()`).
    """

    __slots__ = (
        "_deadline",
        "_entered",
        "_initial_history",
        "_opening",
        "_opens_with_request",
        "_released",
        "_wait",
        "_waiting",
        "_wake",
        "end_cause",
        "label",
        "overflow",
        "retention_ratio",
    )

    def __init__(
        self,
        engine: EngineState,
        *,
        label: str | None,
        history: Sequence[Mapping[str, Any]] | None,
        wait: bool | None,
        overflow: Overflow = "refuse",
        deadline: Deadline = NEVER,
        opens_with_request: bool = False,
    ) -> None:
        super().__init__(engine)
        self.label = check_label(label)
        self.overflow = check_overflow(overflow)  # of the requests that follow, as the next
        self.retention_ratio = 1.0  # of the limit, to which a chat over it is shortened
        self.end_cause: Cause | None = None
        self._initial_history = check_history(history)
        self._wait = check_wait(wait)
        self._deadline = deadline  # of the admission
        self._opens_with_request = opens_with_request  # by its one request, and is not entered itself
        self._entered = False
        self._opening = trio.CancelScope()  # abort_all and a sleep end the wait for a slot
        self._waiting: dict[Generation, None] = {}  # requests on their way in, in their order
        self._released = trio.Event()
        self._wake = trio.Event()  # for the task: a request has a deadline, or the end has come

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label is not None else ""
        if self.id is None:
            return f"<Session{label} {'without a slot' if self._entered else 'not entered'}>"
        return f"<Session {self.id}{label} {self.phase.value} {self._lifecycle.attachment.value}>"

    @property
    def history(self) -> list[dict[str, Any]]:
        """The committed conversation, as chat messages; empty for one of raw token ids.

        Turns that were dropped for a later turn, which was committed, are not part of it.
        """
        return self.conversation.history

    # ---- the handle -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Session:
        if self._entered:
            raise RuntimeError("a session is entered once")
        self._entered = True
        for observer in self.observers:
            observer.session_entering(self)
        try:
            with self._opening:
                await self._open()
        finally:
            if self._conversation is None:  # refused, cancelled, or ended on the way
                self._gate.ledger.reject()
        if self._conversation is None:
            raise self._ended()
        for observer in self.observers:
            observer.session_opened(self)
        return self

    async def _open(self) -> None:
        """Take a session slot; cancelled, it has none.

        Raises the refusal, RequestRejected for a bad history, and SessionEnded if it was ended meanwhile.
        """
        with self._engine.opening(self):
            await self._gate.admit(self._gate.sessions, self._begin, wait=self._wait, deadline=self._deadline)
        images = RequestImages(self._engine, wait=self._wait, deadline=self._deadline)
        try:
            history, sources = self._engine.take_images(self._initial_history, where="history")
            self._initial_history = None
            history = put_images(history, await images.admit(sources))
            if self.end_cause is not None:  # a thread that copies images is not cancelled
                raise self._ended()
            self._conversation = Conversation(self._engine.tokenizer, history)
            self.hold_payloads()
        except BaseException:
            self.end()
            raise
        finally:
            images.unpin()

    def _begin(self) -> None:
        """Take a session slot, and begin."""
        self.id = self._gate.admit_session()
        self._engine.adopt(self)

    async def __aexit__(self, *exc_info: object) -> None:
        self.end()

    @sampling_checked
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """A request, to be entered. `prompt` is a user message, chat messages, or token ids.

        `media` are images, before the text of the last message: bytes of a PNG, JPEG, WebP or GIF file, paths, or PIL
        images. They are copied out of this process's memory while the request is entered, and not referred to after it.
        `timeout` in seconds runs from this call to the outcome; when it passes, the request is aborted, and TimedOut
        raised with what came until then, whatever the worker does. `wait` says what the request waits for, within
        `timeout` and in the order of arrival, instead of raising EngineOverloaded or EngineAsleep: None, for a free
        slot; True, also while the engine restarts, sleeps or is updated; False, for nothing; it never gets ahead of
        those who wait. Sampling parameters as keywords go before those of `params`. `label` is the caller's name for
        the request, by which `engine.abort` ends it; it need not be unique. Entering raises SessionBusy while another
        request runs, SessionEnded, EngineClosed, and RequestRejected for a bad prompt.
        """
        deadline, params = deadline_after(timeout), merged_params(params, options)
        return Generation(
            self, prompt, params, media=media, keep_partial=keep_partial, deadline=deadline, wait=wait, label=label
        )

    @whole_answer
    @sampling_checked
    async def ask(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One whole answer: `generate` and `result` in one. Cancelled, the request is aborted."""
        params = merged_params(params, options)
        entering = self.generate(
            prompt, params, media=media, keep_partial=keep_partial, timeout=timeout, wait=wait, label=label
        )
        del prompt, media  # this frame lives as long as the answer takes, and must not keep an image
        async with entering as generation:
            return await generation.result()

    def replace_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make these messages the conversation.

        Raises SessionBusy while a request has no outcome, RequestRejected if bad.
        """
        if self.generation is not None and self.generation.outcome is not None:
            self._check_open()  # its turn is decided, also while the worker is not done with it
        else:
            self.check_idle()
        prompt, sources = self._engine.take_images(messages, where="history")
        payloads = RequestImages(self._engine)
        try:
            self.conversation.replace(put_images(prompt, payloads.admit_now(sources)))
            self.hold_payloads()
        finally:
            payloads.unpin()

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """End the session; harmless when it has ended. Posts END_SESSION in the same step if the worker holds it.

        While it is being entered, that raises SessionEnded.
        """
        if self.id is None:
            self._end_opening(cause)
            return
        if self.end_cause is None:
            self.end_cause = cause
        if self.generation is not None:
            self._cut_short(self.generation, cause)
        self._apply(Event.END)
        self.hold_payloads()
        self._wake.set()
        self._opening.cancel()  # it may wait for room for the images in its history
        for generation in self._waiting:
            generation.entering.cancel()

    def _end_opening(self, cause: Cause) -> None:
        if self._entered and not self._opens_with_request:
            self.end_cause = cause
            self._opening.cancel()

    def _free(self) -> None:
        self._engine.release(self)
        self._released.set()

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
                deadline = math.inf if generation is None or generation.outcome is not None else generation.deadline.at
                with trio.move_on_at(deadline) as scope:
                    await self._wake.wait()
                if scope.cancelled_caught and generation is not None:
                    self.abort_request(generation, Cause.TIMEOUT)
                    self.leave(generation)  # decided now: a finish on its way is too late
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
        self._waiting[generation] = None
        try:
            await Admission(self._engine, self, generation).run()
        except EngineError as exc:
            for observer in self.observers:
                observer.request_refused(generation, exc)
            raise
        finally:
            del self._waiting[generation]

    async def open_for_request(self) -> None:
        """Open a session that is opened by its one request."""
        if self._opens_with_request:
            await self._open()

    def reserve(self, generation: Generation) -> None:
        """Take a request slot. Raises why there is none for this request."""
        if generation.outcome is not None:
            return  # aborted while it waited
        self.check_idle()
        generation.request_id = self._gate.admit_request()
        self.generation = generation
        self._apply(Event.RESERVE)
        if generation.deadline.at < math.inf:
            self._wake.set()

    def check_idle(self) -> None:
        """Raise SessionEnded or SessionBusy, unless it could run a request."""
        self._check_open()
        if self.phase is not Phase.IDLE:
            raise SessionBusy(f"the session is busy: its request is {self.phase.value}; await its answer, or abort it")

    def _check_open(self) -> None:
        if self.id is None:
            raise RuntimeError("the session was not entered: use `async with engine.open_session()`")
        if self.end_cause is not None:
            raise self._ended()

    def _ended(self) -> EngineError:
        cause = self.end_cause
        assert cause is not None, "it has ended"
        if cause is Cause.SHUTDOWN:
            return EngineClosed("the engine is closed")
        return SessionEnded(f"the session has ended ({cause.value}): open another one", cause=cause.value)

    # ---- aborts ---------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[Generation]:
        """Its request in flight, and those on their way in."""
        in_flight = [] if self.generation is None or self.generation in self._waiting else [self.generation]
        return [*in_flight, *self._waiting]

    def abort_request(self, generation: Generation, cause: Cause) -> bool:
        """Abort this request if it has no outcome yet; a finish on its way wins, and the first cause.

        Returns whether this call aborts it: False where it has an outcome, or was aborted before.
        """
        if generation.outcome is not None:
            return False
        if self.generation is generation:
            is_first = self.phase in (Phase.PREPARING, Phase.RUNNING, Phase.SUSPENDED)
            if is_first:
                generation.abort_cause = cause
            self._apply(Event.ABORT)
            return is_first
        generation.request_id = self._gate.mint()
        generation.decide(Outcome(FinishReason.ABORT, cause))
        if generation in self._waiting:  # else it was not entered: the books do not have it
            self._gate.ledger.leave_line(cause)
        generation.settle()
        return True

    def abort_waiting(self, cause: Cause) -> int:
        """Abort all of it that waits for a slot: its requests, and its own opening. Returns how many requests."""
        if self.id is None:
            self._end_opening(cause)
        waiting = [generation for generation in self._waiting if generation is not self.generation]
        return sum(self.abort_request(generation, cause) for generation in waiting)

    # ---- the request's reader -------------------------------------------------------------------------------------

    def leave(self, generation: Generation) -> None:
        """The reader goes: without an outcome, the turn is taken back (or kept in part) at once."""
        if self.generation is not generation or generation.outcome is not None:
            return
        self._cut_short(generation, generation.abort_cause)
        self._apply(Event.ABORT)

    def crash(self, error: Exception) -> None:
        """A bug in this session's handling: it ends, as an error, and disturbs nobody else."""
        logger.error("session %s crashed and ends", self.id, exc_info=error)
        if self.generation is not None:
            failure = EngineError(f"the session crashed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.generation.decide(Outcome(FinishReason.ERROR, error=failure))
        self.end(Cause.ERROR)
