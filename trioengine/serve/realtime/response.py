"""Responses: each is one request to the engine, and the events that report its progress to the client."""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.images import KeptImages
from trioengine.actors.session import Session
from trioengine.aio.concurrency import Notifier
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.messages import Adapter
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Completion, FinishReason, Usage
from trioengine.serve.auth import salted
from trioengine.serve.choices import in_fields
from trioengine.serve.errors import ClientError, Problem, RequestAborted, problem_of
from trioengine.serve.ids import new_id
from trioengine.serve.limits import InFlight, size_of
from trioengine.serve.log_fields import REQUEST_ID, set_fields
from trioengine.serve.realtime.item import Item
from trioengine.serve.realtime.items import Items
from trioengine.serve.realtime.outbox import Outbox
from trioengine.serve.realtime.output import Output
from trioengine.serve.realtime.prompt import ChatPrompt, num_turns
from trioengine.serve.realtime.settings import Truncation
from trioengine.text.conversation import check_length, newest_turn
from trioengine.text.tool_calls import ToolForm

logger = logging.getLogger("trioengine")
MAX_OUT_OF_BAND = 4  # responses at a time
_PLACE = re.compile(r"(history|prompt)\[(\d+)\]\.")  # at the beginning of an error's message


class ResponseStatus(enum.Enum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """The request of a response.create: the conversation at that time, and the settings.

    `left_out` are the items that earlier responses removed from all further prompts.
    """

    prompt: ChatPrompt
    params: SamplingParams
    truncation: Truncation
    max_output_tokens: int | str
    metadata: Mapping[str, str] | None = None
    event_id: str | None = None  # the client's
    left_out: tuple[Item, ...] = ()
    is_lasting: bool = False  # later responses leave the same items out
    tool_form: ToolForm | None = None  # of the calls in the answer, which has none without tools

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.prompt.messages

    @property
    def size(self) -> int:
        """The bytes of memory."""
        grammar = self.params.grammar
        return self.prompt.size + (0 if grammar is None else size_of(grammar.source))


@dataclass(slots=True)
class Response:
    """One response; each change queues an event for the client in the same step.

    The outbox's `held` accounts for the bytes of its messages until it ends. Their images are kept until then, or until
    `release`.
    """

    spec: ResponseSpec
    outbox: Outbox
    conversation_id: str | None
    items: Items | None  # of its conversation; None: out of band
    id: str = field(default_factory=lambda: new_id("resp_"))
    status: ResponseStatus = ResponseStatus.IN_PROGRESS
    status_details: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    output: Output = field(init=False)
    dropped_turns: int = 0  # turns left out of its prompt
    dropped_item_ids: list[str] = field(default_factory=list)  # the items in them
    cancelled: bool = False  # by its client; it may still finish before the abort
    session: Session | None = None  # while it answers, from before the prompt is prepared
    generation: Generation | None = None  # while it runs
    _num_charged: int = 0  # bytes
    _kept: KeptImages | None = None

    def __post_init__(self) -> None:
        self.output = Output(self.id, self.outbox, self.items, self.spec.tool_form)

    def begin(self) -> None:
        self._kept = KeptImages(self.spec.messages)
        self._charge(self.spec.size)
        self.outbox.put("response.created", response=self.to_json())

    def cancel(self) -> None:
        """Abort it at the client's request."""
        self.cancelled = True
        if self.generation is not None:
            self.generation.abort()

    def abandon(self) -> None:
        """End its engine session at once, as the client has disconnected."""
        if self.session is not None:
            self.session.end(Cause.DISCONNECT)

    def release(self) -> None:
        """Release its images, unless they were released."""
        if self._kept is not None:
            self._kept.release()

    def finish(self, completion: Completion) -> None:
        """End with an outcome of the engine other than an error. Raises ClientError as `Output.add`."""
        self.output.finish(is_aborted=completion.finish_reason is FinishReason.ABORT)
        self.usage = _usage(completion.usage)
        self._record_dropped(completion.dropped_turns)
        match completion.finish_reason:
            case FinishReason.STOP:
                self._end(ResponseStatus.COMPLETED)
            case FinishReason.LENGTH:
                self._end(ResponseStatus.INCOMPLETE, reason="max_output_tokens")
            case _ if completion.cause is Cause.CLIENT:
                self._end(ResponseStatus.CANCELLED, reason="client_cancelled")
            case _:
                self.fail(problem_of(RequestAborted(completion.cause)))

    def _record_dropped(self, count: int) -> None:
        """Record the turns dropped from the prompt, together with those left out before."""
        left_out, dropped = self.spec.left_out, self.spec.prompt.dropped_item_ids(count)
        self.dropped_turns = count + num_turns(left_out)
        self.dropped_item_ids = [*(item.id for item in left_out), *dropped]
        if self.spec.is_lasting and self.items is not None:
            self.items.leave_out(dropped)

    def fail(self, problem: Problem) -> None:
        """End with an error event; the text sent so far stays, as an incomplete item."""
        self.outbox.put_error(problem, self.spec.event_id)
        self._end(ResponseStatus.FAILED, error={"type": problem.type, "code": problem.code, "message": problem.message})

    def _end(self, status: ResponseStatus, **details: Any) -> None:
        self._charge(-self._num_charged)
        self.release()
        self.status = status
        self.status_details = {"type": status.value, **details} if details else None
        self.output.close(is_completed=status is ResponseStatus.COMPLETED)
        self.outbox.put("response.done", response=self.to_json())

    def _charge(self, size: int) -> None:
        self._num_charged += size
        self.outbox.held.charge(size)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": self.status.value,
            "status_details": self.status_details,
            "output": [] if self.status is ResponseStatus.IN_PROGRESS else self.output.to_json(),
            "conversation_id": self.conversation_id,
            "output_modalities": ["text"],
            "max_output_tokens": self.spec.max_output_tokens,
            "usage": self.usage,
            "metadata": self.spec.metadata,
            "dropped_turns": self.dropped_turns,
            "dropped_item_ids": self.dropped_item_ids,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {"cached_tokens": usage.cached_tokens, "text_tokens": usage.prompt_tokens},
        "output_token_details": {"text_tokens": usage.completion_tokens},
    }


# ---- running responses --------------------------------------------------------------------------------------------


class ConversationResponses:
    """Runs the responses of a conversation one at a time, in one engine session: a cache of the items.

    `begin` never waits; `run` does the work, and calls `on_end` in the step in which a response ends: that may begin
    the next. Cancelling `run` ends the engine session at once.
    """

    def __init__(self, runner: ResponseRunner, label: str, on_end: Callable[[], None]) -> None:
        self._runner = runner
        self._label = label
        self._on_end = on_end
        self._active: Response | None = None
        self._session: Session | None = None
        self._changes = Notifier()

    @property
    def active(self) -> tuple[Response, ...]:
        return () if self._active is None else (self._active,)

    @property
    def is_cancelled(self) -> bool:
        """Whether a response is active that its client has cancelled."""
        return self._active is not None and self._active.cancelled

    def check_room(self) -> None:
        """Raise ClientError while a response is active."""
        if self._active is not None:
            message = f"the conversation has an active response: {self._active.id}"
            raise ClientError("conversation_already_has_active_response", message)

    def begin(self, response: Response) -> None:
        """Start a response whose spec was checked. Raises ClientError while another is active."""
        self.check_room()
        self._active = response
        response.begin()
        self._changes.notify()

    async def idle(self) -> None:
        """Wait until no response is active."""
        while self._active is not None:
            await self._changes.wait()

    async def run(self) -> None:
        """Run responses until cancelled."""
        async with AsyncExitStack() as sessions:
            try:
                while True:
                    while self._active is None:
                        await self._changes.wait()
                    await self._respond(self._active, sessions)
                    self._active = None
                    self._on_end()
                    self._changes.notify()
            finally:
                if self._active is not None:
                    self._active.release()
                if self._session is not None:
                    self._session.end(Cause.DISCONNECT)

    async def _respond(self, response: Response, sessions: AsyncExitStack) -> None:
        with report_failure(response):
            if self._session is None or self._session.end_cause is not None:
                self._session = await sessions.enter_async_context(self._runner.open_session(self._label))
            await self._runner.run(self._session, response)


class OutOfBandResponses:
    """Runs responses that belong to no conversation: a few at a time, each in an engine session of its own.

    They run in the nursery given to `run_in`; cancelling it ends their engine sessions at once.
    """

    def __init__(self, runner: ResponseRunner, label: str) -> None:
        self._runner = runner
        self._label = label
        self._nursery: trio.Nursery | None = None
        self._active: list[Response] = []
        self._changes = Notifier()

    @property
    def active(self) -> tuple[Response, ...]:
        return tuple(self._active)

    def run_in(self, nursery: trio.Nursery) -> None:
        """Set the nursery, after which responses may begin."""
        self._nursery = nursery

    def check_room(self) -> None:
        """Raise ClientError while the highest number of responses is active."""
        if len(self._active) >= MAX_OUT_OF_BAND:
            message = f"response.conversation: {MAX_OUT_OF_BAND} responses run out of band already (the limit)"
            raise ClientError("too_many_responses", message, param="response.conversation")

    def begin(self, response: Response) -> None:
        """Start a response whose spec was checked. Raises ClientError while too many are active."""
        assert self._nursery is not None, "run_in comes before begin"
        self.check_room()
        self._active.append(response)
        response.begin()
        self._nursery.start_soon(self._respond, response)

    async def idle(self) -> None:
        """Wait until no response is active."""
        while self._active:
            await self._changes.wait()

    async def _respond(self, response: Response) -> None:
        try:
            with report_failure(response):
                async with self._runner.open_session(self._label) as session:
                    await self._runner.run(session, response)
        finally:
            response.release()
            self._active.remove(response)
            self._changes.notify()


class ResponseRunner:
    """Runs one response on an engine session; operators can abort it by its id."""

    def __init__(self, engine: Engine, in_flight: InFlight, cache_salt: bytes, adapter: Adapter | None = None) -> None:
        """`adapter` is the sessions' LoRA adapter."""
        self.engine = engine
        self._in_flight = in_flight
        self._cache_salt = cache_salt
        self._adapter = adapter

    def open_session(self, label: str) -> Session:
        """A session for responses, to be entered."""
        return self.engine.open_session(label=label, wait=False, adapter=self._adapter)

    async def run(self, session: Session, response: Response) -> None:
        """Make the response's messages the session's history and prompt, and stream the answer.

        Cancelled, it ends the session. Raises the error that refuses or fails the request.
        """
        messages, truncation = response.spec.messages, response.spec.truncation
        session.set_chat_template_kwargs(response.spec.prompt.variables)
        session.set_overflow(truncation.overflow, truncation.retention_ratio)
        needed = messages if truncation.overflow == "refuse" else newest_turn(messages)
        check_length(needed, self.engine.limits.max_model_len, self.engine.tokenizer)  # before they are copied
        extension, params = _extend_history(session, messages), salted(response.spec.params, self._cache_salt)
        generation = session.generate(extension, params, keep_partial=True, wait=False)
        response.session = session
        try:
            with self._in_flight.running((response.id,), generation):
                await _stream(session, generation, response)
        except RequestRejected as exc:
            named = in_fields(exc, {"grammar": "tools"})
            raise _name_item(named, response.spec.prompt.item_ids, len(messages) - len(extension)) from None
        finally:
            response.session = None


@contextmanager
def report_failure(response: Response) -> Iterator[None]:
    """Fail the response with an error raised in the block, whose log records carry the id of the response."""
    with set_fields({REQUEST_ID: response.id}):
        try:
            yield
        except Exception as exc:
            if not isinstance(exc, (ClientError, EngineError)):
                logger.exception("response %s crashed", response.id)
            response.fail(problem_of(exc))


async def _stream(session: Session, generation: Generation, response: Response) -> None:
    async with generation:
        response.generation = generation
        try:
            if response.cancelled:
                generation.abort()
            response.output.begin()
            async for chunk in generation:
                await response.outbox.room()
                if chunk.text:
                    response.output.add(chunk.text)
        except trio.Cancelled:
            session.end(Cause.DISCONNECT)  # before the generation is left, so that this is its cause
            raise
        finally:
            response.generation = None
    response.finish(generation.completion)


def _extend_history(session: Session, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages beyond the session's history; a history that they do not extend is replaced."""
    history = session.history
    if len(history) < len(messages) and messages[: len(history)] == history:
        return messages[len(history) :]
    session.replace_history(messages[:-1])
    return messages[-1:]


def _name_item(error: RequestRejected, item_ids: Sequence[tuple[str, ...]], num_history: int) -> RequestRejected:
    """Name the item in an error about a part of a message: the first in it.

    `item_ids` has the ids of the items in each message, of which the first `num_history` were the session's history.
    """
    place = _PLACE.match(error.message)
    if place is None:
        return error
    index = int(place[2]) + (num_history if place[1] == "prompt" else 0)
    item_id = next(iter(item_ids[index]), None) if index < len(item_ids) else None
    if item_id is None:
        return error
    return RequestRejected(error.code, f"item {item_id!r}: {error.message[place.end() :]}", param=item_id)
