"""A generation over a connection: one request as its reader sees it, with the surface of the engine's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from copy import copy
from types import TracebackType
from typing import Self

import trio

from trioengine.aio.calls import AsyncOnly
from trioengine.client.request import Request
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Chunk, Completion

_NOT_ENTERED = "the generation was not entered: use `async with session.generate(...)`"


class Generation(AsyncOnly, refuses=("for",)):
    """One request: `async with session.generate(...) as generation: async for chunk in generation`.

    Entering asks the server. It raises the server's refusal, and TimedOut if the timeout passes first. Iterating ends
    normally for stop, length and abort; after the last delta it raises the typed error of a failed request, and
    TimedOut for a request that its timeout has aborted. Leaving before the outcome aborts the request: its turn is
    taken back at once (`keep_partial` keeps the text received so far), and leaving waits until the server has released
    the request, or the timeout passes. When the scope is cancelled, leaving does the same but does not wait. Cancelling
    a read loses nothing: the next read continues. Reading before entering raises RuntimeError, unless the request has
    an outcome; while another task enters, reading waits. Chunks and completion have no token ids and no logprobs,
    because the server does not send them.
    """

    _noun = "a generation"
    _usage = (
        "use `async with session.generate(...) as generation` to read it in chunks by `async for`, "
        "or `await session.ask(...)` for the whole answer"
    )

    def __init__(self, state: Request, enter: Callable[[], Awaitable[None]]) -> None:
        self._state = state
        self._enter = enter  # asks the server; raises the refusal
        self._entered = False
        self._may_have_more = False  # True from entering on, unless that fails
        self._is_being_read = False

    def __repr__(self) -> str:
        state = self._state
        id = f" {state.id}" if state.id is not None else ""
        label = f" {state.label!r}" if state.label is not None else ""
        return f"<Generation{id}{label} {self._progress}>"

    @property
    def _progress(self) -> str:
        if self._state.outcome is not None:
            return self._state.outcome.finish_reason.value
        if not self._entered:
            return "not entered"
        if not self._may_have_more:
            return "refused"
        if self._state.id is None:
            return "in line"
        return self._state.progress

    @property
    def label(self) -> str | None:
        """The caller's name for the request."""
        return self._state.label

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return self._state.params

    @property
    def request_id(self) -> int:
        """The client's number of the request. Raises RuntimeError before the request is entered or aborted."""
        if self._state.id is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._state.id

    @property
    def response_id(self) -> str | None:
        """The server's id of the response; None until the server has begun it."""
        return self._state.response_id

    @property
    def completion(self) -> Completion:
        """The answer, once there is an outcome; partial if it was aborted. Raises the error of a failed request."""
        return self._state.result()

    def abort(self) -> bool:
        """Abort the request; a finish that is on its way wins. Harmless once there is an outcome.

        Returns whether this call aborts it: False if it has an outcome, or was aborted before.
        """
        return self._state.abort(Cause.CLIENT)

    async def result(self) -> Completion:
        """Read to the end and return the whole answer. Raises the typed error of a failed request, and TimedOut."""
        async for _ in self:
            pass
        return self.completion

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a generation is entered once")
        self._entered = self._may_have_more = True
        try:
            await self._enter()
            if self._state.is_timed_out:
                raise self._state.timed_out()
        except BaseException:
            self._may_have_more = False
            self._state.changed.notify()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state = self._state
        state.leave()
        if not state.settled.is_set() and (exc is None or isinstance(exc, Exception)):
            with trio.move_on_at(state.deadline.at):
                await state.settled.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_being_read:
            raise trio.BusyResourceError("another task reads this generation")
        state = self._state
        self._is_being_read = True
        try:
            if state.has_unread or state.outcome is not None:
                await trio.lowlevel.checkpoint()
            while not state.has_unread and state.outcome is None:
                if not self._may_have_more:
                    raise RuntimeError(_NOT_ENTERED)
                await state.changed.wait()
        finally:
            self._is_being_read = False
        if state.has_unread:
            return state.read_nowait()
        if state.outcome is not None and state.outcome.error is not None:
            raise copy(state.outcome.error)
        if state.is_timed_out:
            raise state.timed_out()
        raise StopAsyncIteration
