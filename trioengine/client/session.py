"""A session over a connection: a conversation, its one request at a time, and what the server is told of them.

All changes are synchronous methods, which the handle and the connection call; what they have to say is put into the
posts. Nothing is awaited in a dying scope.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import trio

from trioengine.actors.deadline import deadline_after
from trioengine.actors.waiting_line import NOT_NOW, waits_for
from trioengine.client.connection import Connection
from trioengine.client.conversation import Conversation
from trioengine.client.generation import Generation, Stage
from trioengine.client.outcomes import length_of, outcome_of, usage_of
from trioengine.client.problems import error_of
from trioengine.client.prompt import Message, chat_messages, rendered, response_fields
from trioengine.core.completion import Completion
from trioengine.core.errors import EngineError, SessionBusy, SessionEnded, TimedOut
from trioengine.core.messages import FinishReason
from trioengine.core.options import SamplingOptions, merged_params
from trioengine.core.outcome import Cause, Outcome
from trioengine.core.overflow import Overflow, check_overflow
from trioengine.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.client.client import Client


class Session:
    """One session: `async with client.open_session() as session`.

    Entering opens a WebSocket. Leaving, in whatever way, ends the session: a request in flight is aborted, and the
    WebSocket closed. Leaving waits for the server's goodbye, but neither long nor when the scope is cancelled or left
    by TimedOut.
    """

    def __init__(
        self,
        client: Client,
        *,
        label: str | None,
        history: Sequence[Mapping[str, Any]] | None,
        wait: bool | None,
        overflow: Overflow = "refuse",
        deadline: float = math.inf,
    ) -> None:
        self.label = label
        self.overflow = check_overflow(overflow)  # of the requests that follow
        self.id: str | None = None  # the server's
        self.end_cause: Cause | None = None
        self.generation: Generation | None = None  # its request, until it is settled
        self._client = client
        self._initial_history = history
        self._wait = wait
        self._deadline = deadline  # of the opening
        self._connection = Connection(client.endpoint, self._told, client.tell_state, self._lost)
        self._entered = False
        self._confirming = trio.CancelScope()  # the end of the session ends the wait for its history
        self._loss: EngineError | None = None
        self._waiting: set[Generation] = set()  # those on their way in
        self._conversation = Conversation(self._connection.posts)
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label is not None else ""
        return f"<Session {self.id}{label}>"

    @property
    def history(self) -> list[Message]:
        """The committed conversation, as chat messages, without the turns that were dropped for a later one."""
        return [dict(message) for message in self._conversation.messages]

    @property
    def model(self) -> str | None:
        """The server's name of its model; None before the session is entered."""
        return self._connection.model

    # ---- the handle -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Session:
        if self._entered:
            raise RuntimeError("a session is entered once")
        self._entered = True
        history = [] if self._initial_history is None else chat_messages(self._initial_history, "history")
        events = self._conversation.prepared(history)
        try:
            self.id = await self._client.start(self._connection, wait=self._wait, deadline=self._deadline)
            self._conversation.replace(history, events)
            with trio.move_on_at(self._deadline) as waiting, self._confirming:
                await self._conversation.confirmed()
            if waiting.cancelled_caught:
                raise TimedOut("timed out while the server takes the history")
            if self._confirming.cancelled_caught:
                self._check_open()
        except BaseException:  # it may have begun in the same moment
            self.end()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
        if exc is None or (isinstance(exc, Exception) and not isinstance(exc, TimedOut)):
            await self.ended()

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """A request, to be entered. `prompt` is a user message, or chat messages.

        The arguments are those of the engine's Session.generate; a request that waits asks the server again after the
        time that it names. Entering raises SessionBusy while another request runs, SessionEnded, EngineClosed or
        ConnectionLost when the session is over, and RequestRejected for a bad prompt.
        """
        deadline, params = deadline_after(timeout), merged_params(params, options)
        return Generation(self, prompt, params, keep_partial=keep_partial, deadline=deadline, wait=wait)

    async def ask(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One whole answer: `generate` and `result` in one. Cancelled, the request is aborted."""
        generation = self.generate(prompt, params, keep_partial=keep_partial, timeout=timeout, wait=wait, **options)
        async with generation:
            return await generation.result()

    def replace_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make these messages the conversation.

        Raises SessionBusy while a request has no outcome, RequestRejected if bad.
        What only the server refuses is raised by the next requests, until the history is replaced again.
        """
        if self.generation is not None and self.generation.outcome is not None:
            self._check_open()
        else:
            self._check_idle()
        history = chat_messages(messages, "history")
        self._conversation.replace(history, self._conversation.prepared(history))
        if self.generation is not None:
            self.generation.is_kept = False  # its answer is deleted when the server is done with it

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """End the session; harmless when it has ended. The WebSocket is closed in its own time."""
        if self.end_cause is None:
            self.end_cause = cause
        if self.generation is not None:
            self._conclude(self.generation, Outcome(FinishReason.ABORT, self.generation.abort_cause or cause))
            self._settle(self.generation)
        self._wake_waiting()
        self._connection.close()

    def _wake_waiting(self) -> None:
        """It is over: whoever waits here finds out why."""
        self._confirming.cancel()
        for generation in self._waiting:
            generation.entering.cancel()

    async def ended(self) -> None:
        """Wait until the WebSocket is closed; at once if there never was one."""
        await self._connection.over()

    # ---- a request's way in ---------------------------------------------------------------------------------------

    async def start(self, generation: Generation) -> None:
        """Generation.__aenter__."""
        messages = chat_messages(generation.prompt, "prompt")
        fields = response_fields(generation.params, self.overflow)
        events = self._conversation.prepared(messages)
        self._check_open()
        generation.request_id = next(self._client.request_ids)
        self._waiting.add(generation)
        self._connection.start_soon(self._expire, generation)
        try:
            with generation.entering:
                while self.generation is not None and self.generation.is_stopping:
                    await self.generation.settled.wait()
                await self._conversation.confirmed()
                if generation.outcome is not None:
                    return  # aborted before its turn came
                self._check_idle()
                self.generation = generation
                generation.messages, generation.item_ids = messages, list(events)
                self._conversation.create(events)
                await self._ask(generation, fields, events)
        except BaseException:
            self.leave(generation)
            raise
        finally:
            self._waiting.discard(generation)
        if generation.outcome is None:
            self._check_open()
        elif generation.outcome.error is not None and generation.answer_id is None:
            raise copy(generation.outcome.error)

    async def _ask(self, generation: Generation, fields: dict[str, Any], events: dict[str, str]) -> None:
        """Until the engine takes the request, or never will. The events of the prompt have been posted once."""
        while True:
            generation.ask_id, generation.response_id = f"ask_{next(self._ids)}", None
            generation.problem = generation.refusal = generation.spoiled = None
            generation.stage, generation.cancel_sent = Stage.ASKED, False
            self._connection.posts.put(rendered("response.create", generation.ask_id, {"response": fields}))
            await generation.answered()
            refusal = generation.refusal
            if refusal is None:
                return
            if not (isinstance(refusal, NOT_NOW) and waits_for(refusal, generation.wait)):
                self._conclude(generation, Outcome(FinishReason.ERROR, error=refusal))
                self._settle(generation)
                return
            if generation.spoiled is None:
                await trio.sleep(refusal.retry_after)
            else:  # all of the prompt goes again, so that it is in order
                self._conversation.delete(generation.item_ids)
                await trio.sleep(refusal.retry_after)
                self._conversation.create(events)

    async def _expire(self, generation: Generation) -> None:
        with trio.move_on_at(generation.deadline):
            await generation.settled.wait()
            return
        self.abort_request(generation, Cause.TIMEOUT)
        self.leave(generation)  # decided now: the server may not answer, and a finish on its way is too late
        generation.entering.cancel()

    def _check_open(self) -> None:
        if self.id is None:
            raise RuntimeError("the session was not entered: use `async with client.open_session()`")
        if self.end_cause is not None:
            raise SessionEnded(f"the session has ended ({self.end_cause.value})", cause=self.end_cause.value)
        if self._loss is not None:
            raise copy(self._loss)

    def _check_idle(self) -> None:
        self._check_open()
        if self.generation is not None:
            raise SessionBusy("the session is busy with another request")

    # ---- the request's reader -------------------------------------------------------------------------------------

    def abort_request(self, generation: Generation, cause: Cause) -> bool:
        """Abort this request if it has no outcome yet; a finish on its way wins, and the first cause.

        Returns whether this call aborts it.
        """
        if generation.is_stopping:
            return False
        generation.abort_cause = cause
        self._cancel(generation)
        return True

    def leave(self, generation: Generation) -> None:
        """The reader goes: without an outcome, the turn is taken back (or kept in part) at once."""
        if not generation.settled.is_set():
            self._conclude(generation, Outcome(FinishReason.ABORT, generation.abort_cause or Cause.CLIENT))
            self._cancel(generation)

    def _cancel(self, generation: Generation) -> None:
        """Nothing more is wanted of it: tell the server, if it has heard of it."""
        if generation.stage is Stage.NONE:
            self._conclude(generation, Outcome(FinishReason.ABORT, generation.abort_cause or Cause.CLIENT))
            self._settle(generation)
        elif not generation.cancel_sent:
            generation.cancel_sent = True
            self._connection.posts.put(rendered("response.cancel", f"cancel_{next(self._ids)}", {}))

    # ---- what the server says -------------------------------------------------------------------------------------

    def _told(self, event: dict[str, Any]) -> None:
        generation = self.generation
        match event["type"]:
            case "response.created" if generation is not None:
                generation.stage, generation.response_id = Stage.CREATED, event["response"]["id"]
            case "response.output_item.added" if generation is not None:
                generation.stage, generation.answer_id = Stage.ADMITTED, event["item"]["id"]
                generation.notify()
            case "response.output_text.delta" if generation is not None:
                generation.receive(event["delta"])
            case "response.done" if generation is not None:
                self._done(generation, event["response"])
            case "conversation.item.done":
                self._conversation.answered(f"create_{event['item']['id']}")
            case "conversation.item.deleted":
                self._conversation.answered(f"delete_{event['item_id']}")
            case "error":
                self._complained(event["error"])

    def _complained(self, problem: dict[str, Any]) -> None:
        event_id, generation = problem.get("event_id"), self.generation
        self._conversation.answered(event_id, error_of(problem))
        if generation is None or event_id is None:
            return
        if event_id == generation.ask_id:
            generation.problem = error_of(problem)
            if generation.stage is Stage.ASKED:  # it is not even begun
                self._refused(generation, generation.spoiled or generation.problem)
        elif event_id in {f"create_{id}" for id in generation.item_ids} and generation.outcome is None:
            generation.spoiled = error_of(problem)
            self._cancel(generation)

    def _done(self, generation: Generation, response: dict[str, Any]) -> None:
        if generation.spoiled is not None:
            self._refused(generation, generation.spoiled)
            return
        if not generation.is_timed_out:  # the error has its completion
            generation.usage, generation.dropped_turns = usage_of(response), response.get("dropped_turns", 0)
        outcome = outcome_of(response, generation.abort_cause, generation.problem)
        if outcome.error is not None:
            self._refused(generation, outcome.error)
            return
        self._over(generation, outcome)
        if generation.is_kept and generation.answer_id is not None and length_of(response) > len(generation.text):
            self._conversation.truncate(generation.answer_id, len(generation.text))
        if generation.is_kept:
            self._conversation.drop(response.get("dropped_item_ids", ()))

    def _refused(self, generation: Generation, error: EngineError) -> None:
        if generation.spoiled is not None and generation.answer_id is not None:
            self._conversation.delete([generation.answer_id])
            generation.answer_id = None
        if generation.answer_id is None and not generation.is_stopping:
            generation.stage, generation.refusal = Stage.NONE, error
            generation.notify()
        elif generation.abort_cause is not None:
            self._over(generation, Outcome(FinishReason.ABORT, generation.abort_cause))
        else:
            self._over(generation, Outcome(FinishReason.ERROR, error=error))

    def _over(self, generation: Generation, outcome: Outcome) -> None:
        """The server is done with the response."""
        generation.stage = Stage.NONE
        self._conclude(generation, outcome)
        if generation.answer_id is not None and not generation.is_kept:
            self._conversation.delete([generation.answer_id])
        self._settle(generation)

    def _lost(self, error: EngineError) -> None:
        """The connection is over."""
        self._loss = error
        if self.generation is not None:
            cause = self.generation.abort_cause
            outcome = Outcome(FinishReason.ABORT, cause) if cause else Outcome(FinishReason.ERROR, error=error)
            self._conclude(self.generation, outcome)
            self._settle(self.generation)
        self._wake_waiting()

    # ---- the outcome ----------------------------------------------------------------------------------------------

    def _conclude(self, generation: Generation, outcome: Outcome) -> None:
        """Decide the outcome, if that is not done, and with it whether the turn is committed."""
        if generation.outcome is not None:
            return
        is_partial = outcome.finish_reason is FinishReason.ABORT and generation.keep_partial and generation.text != ""
        generation.is_kept = is_partial or outcome.is_complete
        if generation.is_kept and generation.answer_id is not None:
            messages = [*generation.messages, {"role": "assistant", "content": generation.text}]
            self._conversation.commit(messages, [*generation.item_ids, generation.answer_id])
        else:
            self._conversation.delete(generation.item_ids)
        generation.decide(outcome)

    def _settle(self, generation: Generation) -> None:
        if self.generation is generation:
            self.generation = None
        generation.settle()
