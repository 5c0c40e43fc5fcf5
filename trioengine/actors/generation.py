"""A generation: one request as its reader sees it, in chunks that merge the unread part of the answer.

`Generation` is the reader's handle, the same for an engine in this process and for a client. `ReadableRequest` is the
record behind it, which the engine and the client each complete.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from copy import copy
from types import TracebackType
from typing import Protocol, Self

import trio

from trioengine.aio.calls import AsyncOnly
from trioengine.aio.concurrency import Deadline, Notifier
from trioengine.core.checks import check_flag, check_label, check_wait
from trioengine.core.errors import Outcome, TimedOut
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Chunk, Completion

_NOT_ENTERED = "the generation was not entered: use `async with session.generate(...)`"


class Unread(Protocol):
    """The unread part of an answer."""

    def read_nowait(self) -> Chunk:
        """Take the unread part as one chunk, which is empty if everything was read."""
        ...

    def read_text_nowait(self) -> str:
        """Take the unread part as its text alone; its tokens count as read."""
        ...


class ReadableRequest(abc.ABC):
    """The record of one request, as far as its reader needs it. Everything here is synchronous."""

    __slots__ = (
        "_sink",
        "changed",
        "deadline",
        "entering",
        "id",
        "keep_partial",
        "label",
        "outcome",
        "params",
        "settled",
        "wait",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        keep_partial: bool,
        deadline: Deadline,
        wait: bool | None,
        label: str | None,
    ) -> None:
        self.label = check_label(label)
        self.params = params
        self.keep_partial = check_flag("keep_partial", keep_partial)
        self.deadline = deadline
        self.wait = check_wait(wait)
        self.id: int | None = None
        self.outcome: Outcome | None = None
        self.settled = trio.Event()  # the worker has finished with the request, and its slot is free
        self.entering = trio.CancelScope()  # of the task that enters: an abort ends its wait and its preparation
        self.changed = Notifier()  # of the unread part and of the outcome
        self._sink: Callable[[Unread], bool] = _decline

    # ---- supplied by the engine's and the client's records ----------------------------------------------------------

    @property
    @abc.abstractmethod
    def progress(self) -> str:
        """The state of a request without an outcome, in a word."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as it was tokenized; () if it is not known here."""
        return ()

    @property
    @abc.abstractmethod
    def has_unread(self) -> bool: ...

    @abc.abstractmethod
    def read_nowait(self) -> Chunk:
        """Take the unread part as one chunk."""

    @abc.abstractmethod
    def read_text_nowait(self) -> str:
        """Take the unread part as its text alone; its tokens count as read."""

    @abc.abstractmethod
    def completion(self, outcome: Outcome) -> Completion:
        """The answer as it is with this outcome."""

    @abc.abstractmethod
    def abort(self, cause: Cause) -> bool:
        """Abort the request if it has no outcome. Returns whether this call aborts it."""

    @abc.abstractmethod
    def leave(self) -> None:
        """The reader goes: without an outcome the request is aborted, and its turn taken back or kept in part, now."""

    # ---- shared -----------------------------------------------------------------------------------------------------

    def is_called(self, name: int | str) -> bool:
        """Whether this is the request's id or its label."""
        return name == (self.label if isinstance(name, str) else self.id)

    def set_sink(self, take: Callable[[Unread], bool]) -> None:
        """See `Generation.set_sink`."""
        if self.outcome is None:
            self._sink = take

    def notify_reader(self) -> None:
        """Give the reader the rows that were received."""
        if not self._sink(self):
            self.changed.notify()

    def set_outcome(self, outcome: Outcome) -> None:
        """Set the outcome unless there is one, and wake the reader."""
        self._sink = _decline
        if self.outcome is None:
            self.outcome = outcome
        self.changed.notify()

    def set_settled(self) -> None:
        """The worker has finished with the request, or never gets it."""
        self.entering.cancel()
        self.settled.set()

    @property
    def is_timed_out(self) -> bool:
        """Whether its timeout has ended the request."""
        return self.outcome is not None and self.outcome.cause is Cause.TIMEOUT

    def timed_out(self) -> TimedOut:
        """The error of a request that its timeout has ended."""
        return self.deadline.passed_by(self.result())

    def result(self) -> Completion:
        """The answer. Raises the error of a failed request, and RuntimeError before the outcome."""
        if self.outcome is None:
            raise RuntimeError("the generation has no outcome yet: read it to its end, or `await generation.result()`")
        if self.outcome.error is not None:
            raise copy(self.outcome.error)
        return self.completion(self.outcome)


class Generation(AsyncOnly, refuses=("for",)):
    """One request: `async with session.generate(...) as generation: async for chunk in generation`.

    Entering reserves, prepares and posts the request. It raises the refusal, and TimedOut if the timeout passes on the
    way. Iterating ends normally for stop, length and abort; after the last delta it raises the typed error of a failed
    request, and TimedOut for a request that its timeout has aborted. Leaving before the outcome aborts the request: its
    turn is taken back at once (`keep_partial` keeps the text that was received), and leaving waits until the worker
    has finished with it, or the timeout passes. When the scope is cancelled, leaving does the same but does not wait.
    Cancelling a read loses nothing: the next read goes on. Reading before entering raises RuntimeError, unless there is
    an outcome (a request may be aborted before it is entered); while another task enters, reading waits. Over a
    network connection chunks and completion have no token ids and no logprobs: a server does not send them.
    """

    __slots__ = ("__weakref__", "_enter", "_is_being_read", "_may_have_more", "_state")

    _noun = "a generation"
    _usage = (
        "use `async with session.generate(...) as generation` to read it in chunks by `async for`, "
        "or `await session.ask(...)` for the whole answer"
    )

    def __init__(self, state: ReadableRequest, enter: Callable[[], Awaitable[None]]) -> None:
        self._state = state
        # submits the request, with its prompt; raises the refusal; None once it is called, so that the prompt can go
        self._enter: Callable[[], Awaitable[None]] | None = enter
        self._may_have_more = False  # from entering on, unless that fails
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
        if self._enter is not None:
            return "not entered"
        if not self._may_have_more:
            return "refused"
        return "in line" if self._state.id is None else self._state.progress

    @property
    def request_id(self) -> int:
        """The engine's number of the request or, over a connection, the client's. RuntimeError before it has one."""
        if self._state.id is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._state.id

    @property
    def label(self) -> str | None:
        """The caller's name for the request."""
        return self._state.label

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters as they were given."""
        return self._state.params

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as it was tokenized; () before the generation was entered, and over a connection."""
        return self._state.prompt_token_ids

    @property
    def outcome(self) -> Outcome | None:
        """The finish reason, with the cause of an abort and the error of a failure; None while the request goes on."""
        return self._state.outcome

    @property
    def completion(self) -> Completion:
        """The answer, once there is an outcome, partial if it was aborted; raises the error of a failed request."""
        return self._state.result()

    def abort(self) -> bool:
        """Abort the request; harmless when it has an outcome. A finish that is on its way wins.

        Returns whether this call aborts it: False where it has an outcome, or was aborted before.
        """
        return self._state.abort(Cause.CLIENT)

    async def result(self) -> Completion:
        """Read to the end and return the whole answer. Raises the typed error of a failed request, and TimedOut."""
        async for _ in self:
            pass
        return self.completion

    async def wait_settled(self) -> None:
        """Wait until the worker has finished with the request, and its slot is free."""
        await self._state.settled.wait()

    def set_sink(self, take: Callable[[Unread], bool]) -> None:
        """Until there is an outcome, call `take` in the step in which something can be read, in place of a wake-up.

        It must not wait. It returns True if it has taken the unread part; False wakes the reader. In an engine an
        exception in it ends the session as a crash does.
        """
        self._state.set_sink(take)

    async def __aenter__(self) -> Self:
        if self._enter is None:
            raise RuntimeError("a generation is entered once")
        entering, self._enter = self._enter(), None
        self._may_have_more = True
        try:
            await entering
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


def _decline(unread: Unread) -> bool:
    return False
