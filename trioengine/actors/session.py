"""A session, as its user sees it: a handle on a `SessionActor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from trioengine.actors.admission import admit, admit_behind, open_session
from trioengine.actors.generation import Generation
from trioengine.actors.images import RequestImages, put_images
from trioengine.actors.media import Media
from trioengine.actors.request import Request
from trioengine.actors.runtime import Runtime
from trioengine.actors.session_actor import SessionActor
from trioengine.aio.calls import AsyncOnly, whole_answer
from trioengine.aio.concurrency import NEVER, deadline_after
from trioengine.core.sampling_params import (
    Overflow,
    SamplingOptions,
    SamplingParams,
    check_overflow,
    check_retention_ratio,
    merged_params,
    sampling_checked,
)
from trioengine.core.tools import ToolChoice, asked_tools
from trioengine.core.types import Cause, Completion
from trioengine.text.chat_template import checked_variables
from trioengine.text.conversation import Prompt


class Session(AsyncOnly):
    """One session: `async with engine.open_session() as session`.

    Entering takes a session slot. Leaving, in whatever way, ends the session: a request in flight is aborted,
    END_SESSION is posted in the same step, and nothing is waited for, so cancellation cannot interrupt it. The slot is
    free when the worker has answered (`await session.ended()`).
    """

    __slots__ = ("__weakref__", "_runtime", "_state")

    _noun = "a session"
    _usage = "use `async with engine.open_session() as session`"

    def __init__(self, runtime: Runtime, state: SessionActor) -> None:
        self._runtime = runtime
        self._state = state

    def __repr__(self) -> str:
        return repr(self._state)

    @property
    def id(self) -> int | None:
        """The engine's number of the session; None before it has a slot."""
        return self._state.id

    @property
    def label(self) -> str | None:
        """The caller's name for the session."""
        return self._state.label

    @property
    def end_cause(self) -> Cause | None:
        """Why the session has ended; None while it goes on."""
        return self._state.end_cause

    @property
    def history(self) -> list[dict[str, Any]]:
        """The committed conversation, as chat messages; empty for one of raw token ids.

        Turns that were dropped for a later turn, which was committed, are not part of it.
        """
        return self._state.conversation.history

    async def __aenter__(self) -> Session:
        state = self._state
        if state.opening.is_entered:
            raise RuntimeError("a session is entered once")
        state.opening.is_entered = True
        for observer in self._runtime.observers:
            observer.session_entering(self)
        try:
            with state.opening.scope:
                await open_session(self._runtime, state)
        finally:
            if not state.is_open:  # refused, cancelled, or ended on the way
                self._runtime.gate.ledger.reject()
        if not state.is_open:
            raise state.ended_error()
        for observer in self._runtime.observers:
            observer.session_opened(self)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._state.end()

    @sampling_checked
    def generate(
        self,
        prompt: Prompt,
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
        """A request, to be entered. `prompt` is a user message, chat messages, or token ids.

        `media` are images, before the text of the last message: bytes of a PNG, JPEG, WebP or GIF file, paths, or PIL
        images. They are copied out of this process's memory while the request is entered, and not referred to after it.
        `tools` are functions that the model may call, as chat completions have them; `tool_choice` and
        `parallel_tool_calls` as well: "required" and a function's name force calls, by a grammar. The calls are in
        `completion.tool_calls`, and their outputs go back as messages of the role `tool` in the next prompt.
        `timeout` in seconds runs from this call to the outcome; when it passes, the request is aborted, and TimedOut
        raised with the part that was received, even if the worker hangs. `wait` decides whether the request waits,
        within `timeout` and in the order of arrival, instead of raising EngineOverloaded or EngineAsleep: None, for a
        free slot; True, also while the engine restarts, sleeps or is updated; False, for nothing; it never gets ahead
        of those who wait. Sampling parameters as keywords go before `params`. `label` is the caller's name for
        the request, by which `engine.abort` ends it; it need not be unique. Entering raises SessionBusy while another
        request runs, SessionEnded, EngineClosed, and RequestRejected for a bad prompt.
        """
        deadline, params = deadline_after(timeout), merged_params(params, options)
        state, asked = self._state, None
        if tools is not None or tool_choice != "auto" or parallel_tool_calls is not True:
            asked = asked_tools(tools, tool_choice, parallel_tool_calls, params)
        request = Request(
            params,
            session=state,
            observers=self._runtime.observers,
            keep_partial=keep_partial,
            deadline=deadline,
            wait=wait,
            label=label,
            tools=asked,
        )
        generation = Generation(request, partial(admit, self._runtime, state, request, prompt, media))
        for observer in self._runtime.observers:
            observer.request_created(generation)
        return generation

    @whole_answer
    @sampling_checked
    async def ask(
        self,
        prompt: Prompt,
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
        entering = self.generate(
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
        )
        del prompt, media  # this frame lives as long as the answer takes, and must not keep an image
        async with entering as generation:
            return await generation.result()

    def replace_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make these messages the conversation.

        Raises SessionBusy while a request has no outcome, RequestRejected if bad.
        """
        state, runtime = self._state, self._runtime
        if state.request is not None and state.request.outcome is not None:
            state.check_open()  # its turn is decided, also while the worker has not finished with it
        else:
            state.check_idle()
        prompt, sources = runtime.take_images(messages, where="history")
        images = RequestImages(runtime.images)
        try:
            state.conversation.replace(put_images(prompt, images.admit_now(sources)))
            state.hold_payloads()
        finally:
            images.unpin()

    def set_overflow(self, overflow: Overflow, retention_ratio: float = 1.0) -> None:
        """Set the policy of the requests that follow for a chat that outgrows the context.

        `retention_ratio` is the part of the limit to which a chat over it is shortened. Raises RequestRejected for an
        unknown policy, or a ratio outside of 0 to 1.
        """
        policy, ratio = check_overflow(overflow), check_retention_ratio(retention_ratio)
        self._state.overflow, self._state.retention_ratio = policy, ratio

    def set_chat_template_kwargs(self, variables: Mapping[str, Any]) -> None:
        """Set the variables for the chat template of the requests that follow.

        Raises RequestRejected as `Engine.open_session` does, SessionEnded, and SessionBusy while there is a request.
        """
        self._state.check_idle()
        self._state.conversation.set_variables(checked_variables(variables))

    def end(self, cause: Cause = Cause.CLIENT) -> None:
        """End the session; harmless when it has ended. Posts END_SESSION in the same step if the worker holds it.

        While it is being entered, that raises SessionEnded.
        """
        self._state.end(cause)

    async def ended(self) -> None:
        """Wait until the worker has let go of the session and its slot is free; at once if it never was entered."""
        if self._state.id is not None:
            await self._state.released.wait()


def further_choice(session: Session, first: Generation, params: SamplingParams, *, wait: bool | None) -> Generation:
    """A request with the prompt of `first`, to be entered; `wait` as in Session.generate.

    `first` is a request of another session without a history, with the same grammar and cache salt. Entering takes a
    slot at once; the prompt is taken as it was prepared for `first`, and posted when that has its first token, or is
    over. So the worker finds it in its prefix cache.
    """
    runtime, state = session._runtime, session._state
    leader = first._state
    assert isinstance(leader, Request), "both are requests of this engine"
    request = Request(params, session=state, observers=runtime.observers, deadline=NEVER, wait=wait, leader=leader)
    generation = Generation(request, partial(admit_behind, runtime, state, request))
    for observer in runtime.observers:
        observer.request_created(generation)
    return generation
