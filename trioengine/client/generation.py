"""A generation over a connection: one request as its reader sees it, like the engine's."""

from __future__ import annotations

import enum
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from trioengine.client.prompt import Message
from trioengine.core.completion import Chunk, Completion
from trioengine.core.errors import EngineError, RequestRejected
from trioengine.core.lifecycle import Cause, Outcome
from trioengine.core.messages import Usage
from trioengine.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from trioengine.client.session import Session


class Stage(enum.Enum):
    """Where its response stands, as the server says."""

    NONE = "none"  # nothing is asked, or what was asked is over
    ASKED = "asked"
    CREATED = "created"
    ADMITTED = "admitted"  # the engine has taken the request


class Generation:
    """One request: `async with session.generate(...) as generation: async for chunk in generation`.

    Entering asks the server; what is refused is raised there. Iterating ends normally for stop, length and abort, and
    raises the typed error when the request failed, after the last delta. Leaving before the outcome aborts the request:
    its turn is taken back at once (`keep_partial` keeps what came until then), and leaving waits until the server has
    let go of it. When the scope is cancelled, leaving does the same but does not wait. Cancelling a read loses nothing:
    the next read goes on. Chunks and completion have no token ids and no logprobs: these are not sent.
    """

    def __init__(
        self,
        session: Session,
        prompt: object,
        params: SamplingParams | None,
        *,
        keep_partial: bool,
        deadline: float,
        wait: bool,
    ) -> None:
        self.prompt = prompt
        self.params = _checked(params)
        self.keep_partial = keep_partial
        self.deadline = deadline
        self.wait = wait
        self.outcome: Outcome | None = None
        self.settled = trio.Event()  # the server is done with it
        self.response_id: str | None = None  # the server's
        # The session's part: it alone writes these.
        self.entering = trio.CancelScope()
        self.stage = Stage.NONE
        self.messages: list[Message] = []
        self.item_ids: list[str] = []  # of these
        self.answer_id: str | None = None  # the item of the answer
        self.ask_id = ""  # the event that asked for the response
        self.problem: EngineError | None = None  # what an error event said of it
        self.refusal: EngineError | None = None  # why the engine does not take it
        self.spoiled: EngineError | None = None  # why its prompt is not what it should be
        self.abort_cause: Cause | None = None
        self.cancel_sent = False
        self.is_kept = False
        self.usage = Usage(0, 0, 0)
        self._request_id: int | None = None
        self._session = session
        self._pieces: list[str] = []  # of the answer
        self._unread: list[str] = []  # of these
        self._news = trio.Event()
        self._reading = False
        self._entered = False

    def __repr__(self) -> str:
        state = self.stage.value if self.outcome is None else self.outcome.finish_reason.value
        return f"<Generation {self._request_id} {state}>"

    @property
    def request_id(self) -> int:
        """The client's id of the request, once entered; the server's is `response_id`."""
        if self._request_id is None:
            raise RuntimeError("the generation was not entered: use `async with session.generate(...)`")
        return self._request_id

    @request_id.setter
    def request_id(self, request_id: int) -> None:
        self._request_id = request_id

    @property
    def text(self) -> str:
        """What came until now, read or not."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def completion(self) -> Completion:
        """The answer, once there is an outcome; raises the typed error of a failed request."""
        if self.outcome is None:
            raise RuntimeError("the generation has no outcome yet")
        if self.outcome.error is not None:
            raise copy(self.outcome.error)
        outcome = self.outcome
        return Completion(self.request_id, self.text, (), None, outcome.finish_reason, outcome.cause, self.usage)

    def abort(self) -> None:
        """Ask for the end of this request; harmless when it has one. A finish that is on its way wins."""
        self._session.abort_request(self, Cause.CLIENT)

    async def result(self) -> Completion:
        """Read to the end and return the whole answer. Raises the typed error of a failed request."""
        async for _ in self:
            pass
        return self.completion

    async def __aenter__(self) -> Generation:
        if self._entered:
            raise RuntimeError("a generation is entered once")
        self._entered = True
        await self._session.start(self)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._session.leave(self)
        if not self.settled.is_set() and (exc is None or isinstance(exc, Exception)):
            await self.settled.wait()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Chunk:
        if self._reading:
            raise trio.BusyResourceError("another task reads this generation")
        self._reading = True
        try:
            if self._unread or self.outcome is not None:
                await trio.lowlevel.checkpoint()
            while not self._unread and self.outcome is None:
                await self._news.wait()
        finally:
            self._reading = False
        if self._unread:
            text, self._unread = "".join(self._unread), []
            return Chunk(text, ())
        if self.outcome is not None and self.outcome.error is not None:
            raise copy(self.outcome.error)
        raise StopAsyncIteration

    # ---- what the session tells it; synchronous -------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end; the server may not have heard of it."""
        return self.outcome is not None or self.abort_cause is not None

    def receive(self, text: str) -> None:
        if self.outcome is None and text:
            self._pieces.append(text)
            self._unread.append(text)
            self.notify()

    def decide(self, outcome: Outcome) -> None:
        """The first outcome is the outcome."""
        if self.outcome is None:
            self.outcome = outcome
        self.notify()

    def settle(self) -> None:
        """The server is done with the request, or will never hear of it."""
        self.entering.cancel()
        self.settled.set()

    def notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def answered(self) -> None:
        """Wait until the server has said whether the engine takes the request."""
        while self.stage in (Stage.ASKED, Stage.CREATED):
            await self._news.wait()


def _checked(params: SamplingParams | None) -> SamplingParams:
    if not (params is None or isinstance(params, SamplingParams)):
        shown = type(params).__name__
        raise RequestRejected("invalid_value", f"params must be SamplingParams, got {shown}", param="params")
    return SamplingParams() if params is None else params
