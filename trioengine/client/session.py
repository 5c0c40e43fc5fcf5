"""A session over a connection: the user's handle, and its state.

All changes are synchronous methods, which the handle and the connection call; nothing is awaited in a cancelled scope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import trio

from trioengine.aio.calls import AsyncOnly, whole_answer
from trioengine.aio.concurrency import NEVER, Deadline, deadline_after
from trioengine.client.connection import Connection, Connections
from trioengine.client.conversation import Conversation, Prepared
from trioengine.client.generation import Generation, RequestProxy, Requests
from trioengine.client.problems import error_of
from trioengine.client.prompt import (
    Media,
    Message,
    chat_messages,
    check_sizes,
    check_tools_size,
    is_long,
    response_fields,
)
from trioengine.core.checks import PromptPlaces, check_history, check_label, check_wait
from trioengine.core.errors import EngineError, Outcome, SessionBusy, SessionEnded, TimedOut
from trioengine.core.sampling_params import (
    Overflow,
    SamplingOptions,
    SamplingParams,
    check_overflow,
    merged_params,
    sampling_checked,
)
from trioengine.core.tools import ToolChoice, asked_tools
from trioengine.core.types import Cause, Completion, FinishReason


class Session(AsyncOnly):
    """One session: `async with client.open_session() as session`.

    Entering opens a WebSocket. Leaving, in whatever way, ends the session: a request in flight is aborted, and the
    WebSocket closed. Leaving waits until that is done, at most 5 s, and not when the scope is cancelled or left by
    TimedOut.
    """

    _noun = "a session"
    _usage = "use `async with client.open_session() as session`"

    def __init__(self, state: SessionProxy) -> None:
        self._state = state

    def __repr__(self) -> str:
        state = self._state
        label = f" {state.label!r}" if state.label is not None else ""
        if state.id is None:
            return f"<Session{label} {'not connected' if state.entered else 'not entered'}>"
        return f"<Session {state.id}{label}>"

    @property
    def id(self) -> str | None:
        """The server's id of the session; None before it is entered."""
        return self._state.id

    @property
    def label(self) -> str | None:
        """The caller's name for the session."""
        return self._state.label

    @property
    def model(self) -> str | None:
        """The server's name of its model; None before the session is entered."""
        return self._state.connection.model

    @property
    def end_cause(self) -> Cause | None:
        """The cause of the end; None before it."""
        return self._state.end_cause

    @property
    def history(self) -> list[Message]:
        """The committed conversation, as chat messages, without the turns that were dropped for a later one.

        Content with images is a list of parts, the images as data URLs.
        """
        return deepcopy(self._state.conversation.messages)

    async def __aenter__(self) -> Session:
        await self._state.open()
        return self

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generation:
        """A request, to be entered. `prompt` is a user message, or chat messages.

        The arguments are as in the engine's Session.generate; a request that waits asks the server again after the
        time that the refusal names, and `client.abort` ends it by its `label`. `media` are sent as files, PIL images as
        PNG; `history` has them as data URLs. Entering raises SessionBusy while another request runs, SessionEnded,
        EngineClosed or ConnectionLost when the session is over, and RequestRejected for a bad prompt. With `tools`
        entering waits for the first part of the answer, whose first item reports that the engine has the request.
        """
        deadline, params = deadline_after(timeout), merged_params(params, options)
        request = RequestProxy(
            params,
            places=PromptPlaces.of(prompt, media),
            keep_partial=keep_partial,
            deadline=deadline,
            wait=wait,
            label=label,
            conversation=self._state.conversation,
            requests=self._state.requests,
            tools=asked_tools(tools, tool_choice, parallel_tool_calls, params),
        )
        return Generation(request, partial(self._state.enter, request, prompt, media))

    @whole_answer
    @sampling_checked
    async def ask(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        media: Sequence[Media] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = None,
        label: str | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """One whole answer: `generate` and `result` in one. Cancelled, the request is aborted."""
        params = merged_params(params, options)
        async with self.generate(
            prompt,
            params,
            media=media,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            keep_partial=keep_partial,
            timeout=timeout,
            wait=wait,
            label=label,
        ) as generation:
            return await generation.result()

    def replace_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make these messages the conversation.

        Raises SessionBusy while a request has no outcome, RequestRejected if bad. A refusal by the server is raised by
        the next requests, until the history is replaced again.
        """
        self._state.replace_history(messages)

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """End the session; harmless when it has ended. The WebSocket is closed in the background."""
        self._state.end(cause)

    async def ended(self) -> None:
        """Wait until the WebSocket is closed; return at once if there never was one."""
        await self._state.connection.wait_closed()


class SessionProxy:
    """The client's view of one session at the server; the caller's handle is a Session."""

    def __init__(
        self,
        connections: Connections,
        requests: Requests,
        *,
        label: str | None,
        history: Sequence[Mapping[str, Any]] | None = None,
        wait: bool | None,
        overflow: Overflow = "refuse",
        deadline: Deadline = NEVER,
    ) -> None:
        self.label = check_label(label)
        self.id: str | None = None  # the server's
        self.end_cause: Cause | None = None
        self.entered = False
        self.connection = Connection(
            connections.endpoint, self._on_event, connections.report_state, self._on_connection_lost
        )
        self.conversation = Conversation(self.connection.posts)
        self._overflow = check_overflow(overflow)
        self._connections = connections
        self.requests = requests
        self._initial_history = check_history(history)
        self._wait = check_wait(wait)
        self._deadline = deadline  # of opening
        self.opening = trio.CancelScope()  # cancelled by the end of the session
        self._loss: EngineError | None = None
        self._request: RequestProxy | None = None  # the latest that was posted
        self._entering: dict[RequestProxy, None] = {}  # requests that are being entered, in their order

    # ---- opening and ending ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect, and wait until the server has the history."""
        if self.entered:
            raise RuntimeError("a session is entered once")
        self.entered = True
        history = [] if self._initial_history is None else chat_messages(self._initial_history, "history")
        prepared = self.conversation.prepared(history)
        try:
            with self.opening:
                await self._connect(history, prepared)
            if self.opening.cancelled_caught:
                if self._loss is None:
                    self.end()  # the request that it is opened for was aborted, or the session has ended already
                self._check_alive()
        except BaseException:  # the connection may have begun in the same step
            self.end()
            raise

    async def _connect(self, history: list[Message], prepared: Prepared) -> None:
        self.id = await self._connections.start(self.connection, wait=self._wait, deadline=self._deadline)
        check_sizes(prepared.events.values(), takes_images=self.connection.takes_images)
        self.conversation.replace(history, prepared)
        with trio.move_on_at(self._deadline.at):
            await self.conversation.confirmed()
            return
        raise self._deadline.passed("while waiting: the server has not taken the history")

    def replace_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Session.replace_history."""
        request = self._in_flight
        if request is None or request.outcome is None:
            self._check_idle()
        else:
            self._check_open()
        history = chat_messages(messages, "history")
        self.conversation.replace(history, self.conversation.prepared(history))
        if request is not None:
            request.drop_turn()

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """Session.end."""
        if self.end_cause is None:
            self.end_cause = cause
        self._finish_calls(Outcome(FinishReason.ABORT, cause))
        self.connection.close()

    def _on_connection_lost(self, error: EngineError) -> None:
        self._loss = error
        self._finish_calls(Outcome(FinishReason.ERROR, error=error))

    def _finish_calls(self, outcome: Outcome) -> None:
        """Finish the request in flight with this outcome, and let the calls that wait raise the reason of the end."""
        if self._in_flight is not None:
            self._in_flight.end(outcome)
        self.opening.cancel()
        for request in self._entering:
            request.entering.cancel()

    # ---- requests -------------------------------------------------------------------------------------------------

    async def enter(self, request: RequestProxy, prompt: object, media: Sequence[Media]) -> None:
        """Post the request, with this prompt, when its turn has come.

        Return when the engine has taken it, or it was aborted. Raises SessionBusy, SessionEnded, the server's refusal
        and the loss of the connection.
        """
        messages, prepared = await self._prepared(prompt, media)
        del prompt, media  # this frame lives as long as the request waits for its turn
        fields = response_fields(request.params, self._overflow, request.tools)
        check_tools_size(fields)
        self._check_open()
        check_sizes(prepared.events.values(), takes_images=self.connection.takes_images)
        request.register()
        self._entering[request] = None
        self.connection.start_soon(request.expire)
        try:
            with request.entering:
                await self._turn()
                if request.outcome is not None:
                    return  # aborted before its turn came
                self._check_idle()
                self._request = request
                request.post_prompt(messages, prepared)
                await request.ask(fields, prepared.events)
            if request.outcome is None:
                self._check_open()  # the end of the session has cancelled the scope
        except EngineError:
            request.reject()
            raise
        except BaseException:
            request.leave()
            raise
        finally:
            del self._entering[request]
        request.check_refusal()

    async def _turn(self) -> None:
        """Wait until the server has the history, and has ended the request before if that was stopped."""
        await self.conversation.confirmed()
        while (request := self._in_flight) is not None and request.is_stopping:
            await request.settled.wait()
            await self.conversation.confirmed()

    async def _prepared(self, prompt: Any, media: Sequence[Media]) -> tuple[list[Message], Prepared]:
        """The messages of a prompt, and their items."""

        def prepare() -> tuple[list[Message], Prepared]:
            messages = chat_messages(prompt, "prompt", media)
            return messages, self.conversation.prepared(messages)

        return await trio.to_thread.run_sync(prepare) if is_long(media) else prepare()

    @property
    def _in_flight(self) -> RequestProxy | None:
        """The request that was posted and is not settled."""
        return None if self._request is None or self._request.settled.is_set() else self._request

    def _check_open(self) -> None:
        if self.id is None:
            raise RuntimeError("the session was not entered: use `async with client.open_session()`")
        self._check_alive()

    def _check_alive(self) -> None:
        if self.end_cause is not None:
            raise SessionEnded.by(self.end_cause.value)
        if self._loss is not None:
            raise copy(self._loss)

    def _check_idle(self) -> None:
        self._check_open()
        if self._in_flight is not None:
            raise SessionBusy("the session is busy with a request; wait for its outcome, or open another session")

    # ---- the server's events --------------------------------------------------------------------------------------

    def _on_event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "conversation.item.done":
                self.conversation.on_answer(f"create_{event['item']['id']}")
            case "conversation.item.deleted":
                self.conversation.on_answer(f"delete_{event['item_id']}")
            case "error":
                self._on_error(event["error"])
            case _ if (request := self._in_flight) is not None:
                request.on_event(event)

    def _on_error(self, problem: dict[str, Any]) -> None:
        event_id, error = problem.get("event_id"), error_of(problem)
        self.conversation.on_answer(event_id, error)
        request = self._in_flight
        if request is not None and event_id is not None:
            request.on_error(event_id, error, problem.get("param"))
