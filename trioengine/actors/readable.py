"""The reader's half of a generation: entering, reading and leaving are the same in the engine and in its client."""

from __future__ import annotations

import abc
from copy import copy
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import trio

from trioengine.aio.calls import AsyncOnly
from trioengine.aio.deadline import Deadline
from trioengine.aio.nursery import Notifier
from trioengine.core.arguments import check_flag, check_label, check_wait
from trioengine.core.errors import Outcome, TimedOut
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Chunk, Completion

_NOT_ENTERED = "the generation was not entered: use `async with session.generate(...)`"


class Owner(Protocol):
    """The session, as its generation sees it."""

    async def start(self, generation: Any) -> None:
        """Ask for the answer; raises what is refused."""

    def leave(self, generation: Any) -> None:
        """The reader goes."""

    def abort_request(self, generation: Any, cause: Cause) -> bool:
        """The reader wants no more of it. Returns whether this call aborts it."""


S = TypeVar("S", bound=Owner)


class Readable(AsyncOnly, abc.ABC, Generic[S], refuses=("for",)):
    """Base class of the engine's Generation and of its client's, whose docstrings hold the promises.

    Reading it before it is entered raises RuntimeError, unless it has an outcome: it may be aborted before. While
    another task enters it, reading waits.
    """

    __slots__ = (
        "__weakref__",
        "_changes",
        "_entered",
        "_is_being_read",
        "_may_have_more",
        "_request_id",
        "_session",
        "deadline",
        "entering",
        "keep_partial",
        "label",
        "outcome",
        "params",
        "settled",
        "wait",
    )

    _noun = "a generation"
    _usage = (
        "use `async with session.generate(...) as generation` to read it in chunks by `async for`, "
        "or `await session.ask(...)` for the whole answer"
    )

    def __init__(
        self,
        session: S,
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
        self.outcome: Outcome | None = None
        self.settled = trio.Event()  # the worker is done with it, and its slot is free
        self.entering = trio.CancelScope()  # an abort ends the waiting and preparing
        self._session = session
        self._request_id: int | None = None
        self._changes = Notifier()  # of what is unread, and of the outcome
        self._is_being_read = False
        self._entered = False
        self._may_have_more = False  # from when it is entered, unless that fails

    def __repr__(self) -> str:
        id = f" {self._request_id}" if self._request_id is not None else ""
        label = f" {self.label!r}" if self.label is not None else ""
        return f"<Generation{id}{label} {self._shown_state}>"

    @property
    def _shown_state(self) -> str:
        if self.outcome is not None:
            return self.outcome.finish_reason.value
        if not self._entered:
            return "not entered"
        if not self._may_have_more:
            return "refused"
        return "in line" if self._request_id is None else self._progress

    # ---- what the two have of their own ---------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _progress(self) -> str:
        """How far it is, in a word."""

    @property
    @abc.abstractmethod
    def _has_unread(self) -> bool: ...

    @abc.abstractmethod
    def take(self) -> Chunk:
        """What is unread, as one chunk."""

    @abc.abstractmethod
    def _answer(self, outcome: Outcome) -> Completion:
        """The answer, which has this outcome."""

    # ---- what the reader does -------------------------------------------------------------------------------------

    @property
    def request_id(self) -> int:
        """The number of the request, once entered: the engine's or, over a connection, the client's."""
        if self._request_id is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._request_id

    @request_id.setter
    def request_id(self, request_id: int) -> None:
        self._request_id = request_id

    def is_called(self, name: int | str) -> bool:
        """Whether this is its id or its label."""
        return name == (self.label if isinstance(name, str) else self._request_id)

    @property
    def completion(self) -> Completion:
        """The answer, once there is an outcome, partial if it was aborted; raises the error of a failed request."""
        if self.outcome is None:
            raise RuntimeError("the generation has no outcome yet: read it to its end, or `await generation.result()`")
        if self.outcome.error is not None:
            raise copy(self.outcome.error)
        return self._answer(self.outcome)

    def abort(self) -> bool:
        """Ask for the end of this request; harmless when it has one. A finish that is on its way wins.

        Returns whether this call aborts it: False where it has an outcome, or was aborted before.
        """
        return self._session.abort_request(self, Cause.CLIENT)

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
            await self._session.start(self)
            if self.is_timed_out:
                raise self.timed_out()
        except BaseException:
            self._may_have_more = False
            self._changes.notify()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session.leave(self)
        if not self.settled.is_set() and (exc is None or isinstance(exc, Exception)):
            with trio.move_on_at(self.deadline.at):
                await self.settled.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._is_being_read:
            raise trio.BusyResourceError("another task reads this generation")
        self._is_being_read = True
        try:
            if self._has_unread or self.outcome is not None:
                await trio.lowlevel.checkpoint()
            while not self._has_unread and self.outcome is None:
                if not self._may_have_more:
                    raise RuntimeError(_NOT_ENTERED)
                await self._changes.wait()
        finally:
            self._is_being_read = False
        if self._has_unread:
            return self.take()
        if self.outcome is not None and self.outcome.error is not None:
            raise copy(self.outcome.error)
        if self.is_timed_out:
            raise self.timed_out()
        raise StopAsyncIteration

    @property
    def is_timed_out(self) -> bool:
        """Whether its timeout has ended it."""
        return self.outcome is not None and self.outcome.cause is Cause.TIMEOUT

    def timed_out(self) -> TimedOut:
        """The error that a request ends with when its timeout has ended it."""
        return self.deadline.passed_by(self.completion)

    # ---- what the session tells it; synchronous -------------------------------------------------------------------

    def decide(self, outcome: Outcome) -> None:
        """The first outcome is the outcome."""
        if self.outcome is None:
            self.outcome = outcome
        self._changes.notify()

    def settle(self) -> None:
        """The worker is done with the request, or will never hear of it."""
        self.entering.cancel()
        self.settled.set()
