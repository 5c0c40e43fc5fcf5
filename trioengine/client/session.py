"""A session over a connection: the handle, and the way in of its requests. Its events and the server's: `exchange`.

All changes are synchronous methods, which the handle and the connection call. Nothing is awaited in a dying scope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

import trio

from trioengine.aio.calls import AsyncOnly, whole_answer
from trioengine.aio.deadline import NEVER, Deadline, deadline_after
from trioengine.client.connection import Connection
from trioengine.client.conversation import Conversation
from trioengine.client.exchange import Exchange
from trioengine.client.generation import Generation
from trioengine.client.media import Media, is_long
from trioengine.client.prompt import Message, chat_messages, check_sizes, response_fields
from trioengine.core.arguments import check_history, check_label, check_wait
from trioengine.core.errors import EngineError, Outcome, SessionBusy, SessionEnded, TimedOut
from trioengine.core.sampling_params import (
    Overflow,
    SamplingOptions,
    SamplingParams,
    check_overflow,
    merged_params,
    sampling_checked,
)
from trioengine.core.types import Cause, Completion, FinishReason

if TYPE_CHECKING:
    from trioengine.client.client import Client


class Session(AsyncOnly):
    """One session: `async with client.open_session() as session`.

    Entering opens a WebSocket. Leaving, in whatever way, ends the session: a request in flight is aborted, and the
    WebSocket closed. Leaving waits for the server's goodbye, but neither long nor when the scope is cancelled or left
    by TimedOut.
    """

    _noun = "a session"
    _usage = "use `async with client.open_session() as session`"

    def __init__(
        self,
        client: Client,
        *,
        label: str | None,
        history: Sequence[Mapping[str, Any]] | None,
        wait: bool | None,
        overflow: Overflow = "refuse",
        deadline: Deadline = NEVER,
    ) -> None:
        self.label = check_label(label)
        self.overflow = check_overflow(overflow)  # of the requests that follow
        self.id: str | None = None  # the server's
        self.end_cause: Cause | None = None
        self._client = client
        self._initial_history = check_history(history)
        self._wait = check_wait(wait)
        self._deadline = deadline  # of the opening
        self._connection = Connection(client.endpoint, self._told, client.tell_state, self._lost)
        self._entered = False
        self.opens_with: Generation | None = None  # the one request that it is opened for
        self._opening = trio.CancelScope()  # the end of the session ends the wait for its server
        self._loss: EngineError | None = None
        self._waiting: dict[Generation, None] = {}  # those on their way in, in their order
        self._conversation = Conversation(self._connection.posts)
        self._exchange = Exchange(self._connection.posts, self._conversation)

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label is not None else ""
        if self.id is None:
            return f"<Session{label} {'not connected' if self._entered else 'not entered'}>"
        return f"<Session {self.id}{label}>"

    @property
    def history(self) -> list[Message]:
        """The committed conversation, as chat messages, without the turns that were dropped for a later one.

        A content with images is a list of parts, the images with their data URLs.
        """
        return deepcopy(self._conversation.messages)

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
        self._client.adopt(self)
        try:
            with self._opening:
                await self._open(history, events)
            if self._opening.cancelled_caught:
                self._check_alive()
        except BaseException:  # it may have begun in the same moment
            self.end()
            raise
        return self

    async def _open(self, history: list[Message], events: dict[str, str]) -> None:
        self.id = await self._client.start(self._connection, wait=self._wait, deadline=self._deadline)
        check_sizes(events.values(), takes_images=self._connection.takes_images)
        self._conversation.replace(history, events)
        with trio.move_on_at(self._deadline.at):
            await self._conversation.confirmed()
            return
        raise self._deadline.passed("while waiting: the server has not taken the history")

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
        if exc is None or (isinstance(exc, Exception) and not isinstance(exc, TimedOut)):
            await self.ended()

    @sampling_checked
    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """A request, to be entered. `prompt` is a user message, or chat messages.

        The arguments are those of the engine's Session.generate; a request that waits asks the server again after the
        time that it names, and `client.abort` ends it by its `label`. `media` are sent as files, PIL images as PNG;
        `history` has them as data URLs. Entering raises SessionBusy while another request runs, SessionEnded,
        EngineClosed or ConnectionLost when the session is over, and RequestRejected for a bad prompt.
        """
        deadline, params = deadline_after(timeout), merged_params(params, options)
        return Generation(
            self, prompt, params, media=media, keep_partial=keep_partial, deadline=deadline, wait=wait, label=label
        )

    @whole_answer
    @sampling_checked
    async def ask(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
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
        async with self.generate(
            prompt, params, media=media, keep_partial=keep_partial, timeout=timeout, wait=wait, label=label
        ) as generation:
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
        self._client.release(self)
        self._exchange.end(Outcome(FinishReason.ABORT, cause))
        self._wake_waiting()
        self._connection.close()

    def _wake_waiting(self) -> None:
        """It is over: the calls that wait here raise the reason."""
        self._opening.cancel()
        for generation in self._waiting:
            generation.entering.cancel()

    async def ended(self) -> None:
        """Wait until the WebSocket is closed; at once if there never was one."""
        await self._connection.over()

    # ---- a request's way in ---------------------------------------------------------------------------------------

    async def start(self, generation: Generation) -> None:
        """Generation.__aenter__."""
        messages, events = await self._prepared(generation)
        fields = response_fields(generation.params, self.overflow)
        self._check_open()
        check_sizes(events.values(), takes_images=self._connection.takes_images)
        generation.take_id(self._client.request_ids)
        self._waiting[generation] = None
        self._connection.start_soon(self._expire, generation)
        try:
            with generation.entering:
                while self.generation is not None and self.generation.is_stopping:
                    await self.generation.settled.wait()
                await self._conversation.confirmed()
                if generation.outcome is not None:
                    return  # aborted before its turn came
                self._check_idle()
                self._exchange.begin(generation, messages, events)
                await self._exchange.ask(generation, fields, events)
        except BaseException:
            self.leave(generation)
            raise
        finally:
            del self._waiting[generation]
        if generation.outcome is None:
            self._check_open()
        elif generation.outcome.error is not None and generation.answer_id is None:
            raise copy(generation.outcome.error)

    async def _prepared(self, generation: Generation) -> tuple[list[Message], dict[str, str]]:
        """The messages of its prompt, and the events that make items of them."""
        (prompt, generation.prompt), (media, generation.media) = (generation.prompt, None), (generation.media, ())

        def prepare() -> tuple[list[Message], dict[str, str]]:
            messages = chat_messages(prompt, "prompt", media)
            return messages, self._conversation.prepared(messages)

        return await trio.to_thread.run_sync(prepare) if is_long(media) else prepare()

    async def _expire(self, generation: Generation) -> None:
        with trio.move_on_at(generation.deadline.at):
            await generation.settled.wait()
            return
        self.abort_request(generation, Cause.TIMEOUT)
        self.leave(generation)  # decided now: the server may not answer, and a finish on its way is too late
        generation.entering.cancel()

    def _check_open(self) -> None:
        if self.id is None:
            raise RuntimeError("the session was not entered: use `async with client.open_session()`")
        self._check_alive()

    def _check_alive(self) -> None:
        if self.end_cause is not None:
            cause = self.end_cause.value
            raise SessionEnded(f"the session has ended ({cause}): open another one", cause=cause)
        if self._loss is not None:
            raise copy(self._loss)

    def _check_idle(self) -> None:
        self._check_open()
        if self.generation is not None:
            raise SessionBusy("the session is busy with a request; wait for its outcome, or open another session")

    # ---- aborts ---------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation | None:
        """Its request, until it is settled."""
        return self._exchange.generation

    @property
    def requests(self) -> list[Generation]:
        """Its request in flight, and those on their way in."""
        opening = [] if self.opens_with is None or self.id is not None else [self.opens_with]
        in_flight = [] if self.generation is None or self.generation in self._waiting else [self.generation]
        return [*opening, *in_flight, *self._waiting]

    def abort_request(self, generation: Generation, cause: Cause) -> bool:
        """Abort this request if it has no outcome yet; a finish on its way wins, and the first cause.

        Returns whether this call aborts it.
        """
        generation.take_id(self._client.request_ids)
        is_first = self._exchange.abort(generation, cause)
        if generation is self.opens_with and self.id is None:
            self.end(cause)
        return is_first

    def leave(self, generation: Generation) -> None:
        """The reader goes: without an outcome, the turn is taken back (or kept in part) at once."""
        self._exchange.leave(generation)

    # ---- the connection's calls -----------------------------------------------------------------------------------

    def _told(self, event: dict[str, Any]) -> None:
        self._exchange.hear(event)

    def _lost(self, error: EngineError) -> None:
        """The connection is over."""
        self._loss = error
        self._client.release(self)
        self._exchange.end(Outcome(FinishReason.ERROR, error=error))
        self._wake_waiting()
