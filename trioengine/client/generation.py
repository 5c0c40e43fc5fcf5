"""One request over a connection: the reader's handle, and the proxy that follows the request at the server.

A RequestProxy goes through the stages NONE, ASKED, CREATED, ADMITTED and back to NONE. Every change is one synchronous
method: the session and the reader call some, the server's events others. Events for the server are put into the posts
in the same step. `outcome` is decided once, by whichever comes first: the server's response.done, the reader who
leaves, the deadline, or the end of the session. From then on the turn is committed or taken back. The request is
settled when the server has finished the response, or never began it; then the session takes its next request.
"""

from __future__ import annotations

import enum
import math
from copy import copy
from itertools import chain, count
from typing import Any

import trio

from trioengine.actors import generation
from trioengine.actors.waiting_line import NOT_NOW, waits_for
from trioengine.aio.concurrency import Deadline
from trioengine.client.answer import Answer
from trioengine.client.conversation import Conversation, Prepared, index_of
from trioengine.client.problems import outcome_of, placed, usage_of
from trioengine.client.prompt import Message, rendered
from trioengine.core.checks import PromptPlaces
from trioengine.core.errors import EngineError, Outcome, RequestRejected, TimedOut
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.tools import NO_ANSWER, AskedTools, answer_fields
from trioengine.core.types import Cause, Chunk, Completion, FinishReason, Usage


class Stage(enum.Enum):
    """The stage of a request at the server."""

    NONE = "none"  # not asked, or over
    ASKED = "asked"
    CREATED = "created"
    ADMITTED = "admitted"  # the engine has taken the request


class Generation(generation.Generation):
    """A generation over a connection: one request of a client's session."""

    _state: RequestProxy

    @property
    def response_id(self) -> str | None:
        """The server's id of the response; None until the server has begun it."""
        return self._state.response_id


class RequestProxy(generation.ReadableRequest):
    """The client's view of one request at the server; the reader's handle is a Generation."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        places: PromptPlaces,
        keep_partial: bool = False,
        deadline: Deadline,
        wait: bool | None,
        label: str | None,
        conversation: Conversation,
        requests: Requests,
        opening: trio.CancelScope | None = None,
        tools: AskedTools | None = None,
    ) -> None:
        super().__init__(params, keep_partial=keep_partial, deadline=deadline, wait=wait, label=label)
        self.stage = Stage.NONE
        self.response_id: str | None = None  # the server's
        self.is_kept = False  # whether its turn is committed
        self.tools = tools
        self._places = places
        self._conversation = conversation
        self._posts = conversation.posts
        self._requests = requests
        self._opening = opening  # of a session that is opened for this request only
        self._messages: list[Message] = []
        self._item_ids: list[tuple[str, ...]] = []  # of each message
        self._answer = Answer()
        self._kept_ids: list[str] = []  # the items of the answer that are committed
        self._ask_id = ""  # the event that asked for the response
        self._problem: EngineError | None = None  # in an error event about the response
        self._refusal: EngineError | None = None  # the engine has not taken the request
        self._bad_message: EngineError | None = None  # the first refusal of a message of the prompt
        self._abort_cause: Cause | None = None
        self._cancel_sent = False
        self._usage = Usage(0, 0, 0)
        self._dropped_turns = 0
        self._num_read = 0  # of the texts of the answer

    # ---- read by the handle and the session -----------------------------------------------------------------------

    @property
    def progress(self) -> str:
        """The state of a request without an outcome, in a word."""
        return "waiting" if self.stage is Stage.NONE else self.stage.value

    @property
    def has_unread(self) -> bool:
        return self._num_read < len(self._answer.texts) or self._answer.calls.has_unread

    def read_nowait(self) -> Chunk:
        """Take the unread text, and parts of calls, as one chunk."""
        calls = self._answer.calls.read()
        return Chunk(self.read_text_nowait(), (), tool_calls=calls)

    def read_text_nowait(self) -> str:
        """Take the unread text."""
        texts = self._answer.texts
        text, self._num_read = "".join(texts[self._num_read :]), len(texts)
        return text

    @property
    def text(self) -> str:
        """The text received so far, read or not."""
        return self._answer.text

    def completion(self, outcome: Outcome) -> Completion:
        """The answer with this outcome."""
        assert self.id is not None, "aborting and entering take an id"
        return Completion(
            request_id=self.id,
            text=self.text,
            token_ids=(),
            logprobs=None,
            finish_reason=outcome.finish_reason,
            cause=outcome.cause,
            usage=self._usage,
            dropped_turns=self._dropped_turns,
            tool_calls=self._answer.calls.whole,
        )

    def timed_out(self) -> TimedOut:
        """The error of a request that its timeout has aborted."""
        if self._refusal is None:
            return super().timed_out()
        error = self.deadline.passed(f"while waiting: {self._refusal}", self.result())
        error.__cause__ = self._refusal
        return error

    @property
    def is_stopping(self) -> bool:
        """Whether it was aborted or has an outcome; the server may not know yet."""
        return self.outcome is not None or self._abort_cause is not None

    # ---- the session's calls --------------------------------------------------------------------------------------

    def register(self) -> None:
        """Give the request an id, and let the client's `abort` find it until it is settled."""
        self._take_id()
        if not self.settled.is_set():
            self._requests.add(self)

    def post_prompt(self, messages: list[Message], prepared: Prepared) -> None:
        """Post the prepared items of the prompt."""
        self._messages, self._item_ids = messages, prepared.item_ids
        self._conversation.create(prepared.events)

    async def ask(self, fields: dict[str, Any], events: dict[str, str]) -> None:
        """Post the request, and wait until the engine takes or refuses it, or it is aborted."""
        while True:
            self._ask_id, self.response_id = self._posts.mint("ask"), None
            self._problem = self._refusal = self._bad_message = None
            self.stage, self._cancel_sent = Stage.ASKED, False
            self._posts.put(rendered("response.create", self._ask_id, {"response": fields}))
            while self.stage is not Stage.NONE and (self.stage is not Stage.ADMITTED or self._bad_message is not None):
                await self.changed.wait()
            refusal = self._refusal
            if refusal is None:
                return
            if not (isinstance(refusal, NOT_NOW) and waits_for(refusal, self.wait)):
                self._finish(Outcome(FinishReason.ERROR, error=refusal))
                return
            if self._bad_message is None:
                await trio.sleep(refusal.retry_after)
            else:  # post the whole prompt again, to keep its order
                self._conversation.delete(events)
                await trio.sleep(refusal.retry_after)
                self._conversation.create(events)

    def abort(self, cause: Cause) -> bool:
        """Abort the request if it has no outcome yet; the first cause counts. Returns whether this call aborts it."""
        self._take_id()
        if self.is_stopping:
            return False
        self._abort_cause = cause
        self._post_cancel()
        return True

    def reject(self) -> None:
        """Settle without an outcome: the request was refused before it was posted."""
        self._settle()

    def check_refusal(self) -> None:
        """Raise the error of a request that failed before the engine took it."""
        if self.outcome is not None and self.outcome.error is not None and not self._answer.item_ids:
            raise copy(self.outcome.error)

    def leave(self) -> None:
        """Decide the outcome now, as aborted, without the server: the turn is taken back, or kept in part."""
        if not self.settled.is_set():
            self._decide(Outcome(FinishReason.ABORT, self._abort_cause or Cause.CLIENT))
            self._post_cancel()

    def end(self, outcome: Outcome) -> None:
        """Finish with this outcome, or as aborted if it was aborted before: the session is over."""
        self._finish(outcome if self._abort_cause is None else Outcome(FinishReason.ABORT, self._abort_cause))

    def drop_turn(self) -> None:
        """Delete the answer when the server has finished it; the session deletes the rest of the turn."""
        self.is_kept = False

    async def expire(self) -> None:
        """Abort and withdraw the request at its deadline. Returns when it is settled."""
        if self.deadline.at == math.inf:
            return
        with trio.move_on_at(self.deadline.at):
            await self.settled.wait()
            return
        self.abort(Cause.TIMEOUT)
        self.leave()  # without the server, which may not answer; a finish on its way is too late
        self.entering.cancel()

    def _take_id(self) -> None:
        if self.id is None:
            self.id = self._requests.mint()

    def _post_cancel(self) -> None:
        """Post response.cancel once, or finish the request here if it was not posted."""
        if self.stage is Stage.NONE:
            self._finish(Outcome(FinishReason.ABORT, self._abort_cause or Cause.CLIENT))
        elif not self._cancel_sent:
            self._cancel_sent = True
            self._posts.put(rendered("response.cancel", self._posts.mint("cancel"), {}))

    # ---- the server's events --------------------------------------------------------------------------------------

    def on_event(self, event: dict[str, Any]) -> None:
        """Process an event about the response."""
        match event["type"]:
            case "response.output_text.delta":
                if not self._is_over and event["delta"]:
                    self._answer.add_text(event["item_id"], event["delta"])
                    self.notify_reader()
            case "response.function_call_arguments.delta":
                if not self._is_over:
                    self._answer.add_arguments(event["delta"])
                    self.notify_reader()
            case "response.created":
                self.stage, self.response_id = Stage.CREATED, event["response"]["id"]
            case "response.output_item.added":
                self.stage = Stage.ADMITTED
                self._answer.add_item(event["item"], is_over=self._is_over)
                self.changed.notify()
            case "response.done":
                self._on_done(event["response"])

    @property
    def _is_over(self) -> bool:
        """Whether the answer is not taken any more."""
        return self.outcome is not None or self._bad_message is not None

    def on_error(self, event_id: object, error: EngineError, item_id: object) -> None:
        """Process an error about the event with this id, and perhaps about the item `item_id`."""
        if event_id == self._ask_id:
            self._problem = self._with_place(error, item_id)
            if self.stage is Stage.ASKED:  # the response was not created
                self._on_refusal(self._bad_message or self._problem)
        elif self._is_over:
            return  # over, or an earlier message was refused
        elif event_id in {f"create_{id}" for ids in self._item_ids for id in ids}:
            self._bad_message = self._with_place(error, str(event_id).removeprefix("create_"))
            self._post_cancel()

    def _with_place(self, error: EngineError, item_id: object) -> EngineError:
        """The error about this item, with its place in the call's arguments or in the history."""
        index = index_of(item_id, self._item_ids)
        if index is None:
            return self._conversation.with_place(error, item_id) if isinstance(item_id, str) else error
        named = placed(error, f"prompt[{index}]", self._messages[index])
        return self._places.rejection(named) if isinstance(named, RequestRejected) else named

    def _on_done(self, response: dict[str, Any]) -> None:
        if self._bad_message is not None:
            self._on_refusal(self._bad_message)
            return
        if not self.is_timed_out:  # TimedOut holds its completion already
            self._usage, self._dropped_turns = usage_of(response), response.get("dropped_turns", 0)
        outcome = outcome_of(response, self._abort_cause, self._problem)
        if outcome.error is not None:
            self._on_refusal(outcome.error)
            return
        if outcome.finish_reason is FinishReason.STOP and self._answer.calls.whole:
            outcome = Outcome(FinishReason.TOOL_CALLS)
        self._on_over(outcome)
        if self.is_kept:
            for item_id, length in self._answer.longer_ids(response["output"]):
                self._conversation.truncate(item_id, length)
            self._conversation.drop(response.get("dropped_item_ids", ()))

    def _on_refusal(self, error: EngineError) -> None:
        """The server has ended the response with this error: a refusal if the engine has not taken the request."""
        if self._bad_message is not None:
            self._conversation.delete(self._answer.item_ids)
            self._answer = Answer()
        if not self._answer.item_ids and not self.is_stopping:
            self.stage, self._refusal = Stage.NONE, error
            self.changed.notify()
        elif self._abort_cause is not None:
            self._on_over(Outcome(FinishReason.ABORT, self._abort_cause))
        else:
            self._on_over(Outcome(FinishReason.ERROR, error=error))

    def _on_over(self, outcome: Outcome) -> None:
        """The server has finished the response."""
        self.stage = Stage.NONE
        self._decide(outcome)
        kept = self._kept_ids if self.is_kept else ()
        self._conversation.delete([id for id in self._answer.item_ids if id not in kept])
        self._settle()

    # ---- the outcome ----------------------------------------------------------------------------------------------

    def _finish(self, outcome: Outcome) -> None:
        self._decide(outcome)
        self._settle()

    def _decide(self, outcome: Outcome) -> None:
        """Set the outcome unless one is set, and commit the turn or take it back."""
        if self.outcome is not None:
            return
        answer = answer_fields(self.text, self._answer.calls.whole)
        is_partial = outcome.finish_reason is FinishReason.ABORT and self.keep_partial and answer != NO_ANSWER
        self.is_kept = is_partial or outcome.is_complete
        if self.is_kept and self._answer.item_ids:
            self._kept_ids = self._answer.item_ids if outcome.is_complete else self._answer.kept_ids
            messages = [*self._messages, {"role": "assistant", **answer}]
            self._conversation.commit(messages, [*self._item_ids, tuple(self._kept_ids)])
        else:
            self._conversation.delete(chain.from_iterable(self._item_ids))
        self.set_outcome(outcome)

    def _settle(self) -> None:
        """The server has released the request, or never had it."""
        self._requests.discard(self)
        if self._opening is not None:
            self._opening.cancel()
        self.set_settled()


class Requests:
    """All unsettled requests of one client, in the order in which they were entered; mints their ids."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._unsettled: dict[RequestProxy, None] = {}

    def mint(self) -> int:
        return next(self._ids)

    def add(self, request: RequestProxy) -> None:
        self._unsettled[request] = None

    def discard(self, request: RequestProxy) -> None:
        self._unsettled.pop(request, None)

    def abort(self, name: int | str) -> int:
        """Abort the request with this id, or every request with this label. Returns how many this call aborts."""
        named = [each for each in self._unsettled if each.is_called(name)]
        return sum(request.abort(Cause.CLIENT) for request in named)
