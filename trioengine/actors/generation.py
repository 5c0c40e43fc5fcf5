"""A generation: one request as its reader sees it, with a mailbox that merges what was not read yet."""

from __future__ import annotations

from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING

import trio

from trioengine.actors.request_times import RequestTimes
from trioengine.core.completion import Chunk as Chunk
from trioengine.core.completion import Completion as Completion
from trioengine.core.errors import RequestRejected
from trioengine.core.ledger import Stand
from trioengine.core.lifecycle import Cause, Outcome
from trioengine.core.messages import FinishReason, Logprobs, TokensRow, Usage
from trioengine.core.sampling_params import SamplingParams
from trioengine.text.answer import Answer
from trioengine.text.conversation import Prepared, Prompt

if TYPE_CHECKING:
    from trioengine.actors.session import Session


class _Mailbox:
    """Unread deltas, merged into one."""

    __slots__ = ("logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[Logprobs] = []

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.text)

    def add(self, text: str) -> None:
        if text:
            self.text.append(text)

    def take(self, *, with_logprobs: bool) -> Chunk:
        chunk = Chunk("".join(self.text), tuple(self.token_ids), tuple(self.logprobs) if with_logprobs else None)
        self.text.clear()
        self.token_ids.clear()
        self.logprobs.clear()
        return chunk


class Generation:
    """One request: `async with session.generate(...) as generation: async for chunk in generation`.

    Entering reserves, prepares and posts the request; what is refused is raised there. Iterating ends normally for
    stop, length and abort, and raises the typed error when the request failed, after the last delta. Leaving before
    the outcome aborts the request: its turn is taken back at once (`keep_partial` keeps what came until then), and
    leaving waits until the worker has let go of it. When the scope is cancelled, leaving does the same but does not
    wait. Cancelling a read loses nothing: the next read goes on.
    """

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        keep_partial: bool,
        deadline: float,
        wait: bool,
    ) -> None:
        if not (params is None or isinstance(params, SamplingParams)):
            shown = type(params).__name__
            raise RequestRejected("invalid_value", f"params must be SamplingParams, got {shown}", param="params")
        self.prompt: Prompt | None = prompt  # dropped once it is prepared
        self.params = SamplingParams() if params is None else params
        self.keep_partial = keep_partial
        self.deadline = deadline
        self.wait = wait
        self.outcome: Outcome | None = None
        self.settled = trio.Event()  # the worker is done with it, and its slot is free
        # The session's part: it alone writes these.
        self.stand = Stand.PREPARING
        self.entering = trio.CancelScope()  # an abort ends the waiting and preparing
        self.prepared: Prepared | None = None
        self.answer: Answer | None = None
        self.abort_cause = Cause.CLIENT
        self.usage: Usage | None = None
        self.times = RequestTimes(session.observers)
        self._request_id: int | None = None
        self._session = session
        self._logprobs: list[Logprobs] = []
        self._mailbox = _Mailbox()
        self._news = trio.Event()
        self._reading = False
        self._entered = False

    def __repr__(self) -> str:
        state = self.stand.value if self.outcome is None else self.outcome.finish_reason.value
        return f"<Generation {self._request_id} {state}>"

    @property
    def request_id(self) -> int:
        """The engine's id of the request, once entered."""
        if self._request_id is None:
            raise RuntimeError("the generation was not entered: use `async with session.generate(...)`")
        return self._request_id

    @request_id.setter
    def request_id(self, request_id: int) -> None:
        self._request_id = request_id

    @property
    def completion(self) -> Completion:
        """The answer, once there is an outcome; raises the typed error of a failed request."""
        if self.outcome is None:
            raise RuntimeError("the generation has no outcome yet")
        if self.outcome.error is not None:
            raise copy(self.outcome.error)
        answer = self.answer
        ids = tuple(answer.token_ids) if answer is not None else ()
        prompt_tokens = len(self.prepared.token_ids) if self.prepared is not None else 0
        cached_tokens = self.usage.cached_tokens if self.usage is not None else 0
        times = (self.usage.queue_time, self.usage.prefill_time) if self.usage is not None else (0.0, 0.0)
        return Completion(
            request_id=self.request_id,
            text=answer.text if answer is not None else "",
            token_ids=ids,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            finish_reason=self.outcome.finish_reason,
            cause=self.outcome.cause,
            usage=Usage(prompt_tokens, len(ids), cached_tokens, *times),
        )

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
            if self._mailbox or self.outcome is not None:
                await trio.lowlevel.checkpoint()
            while not self._mailbox and self.outcome is None:
                self._news = trio.Event()
                await self._news.wait()
        finally:
            self._reading = False
        if self._mailbox:
            return self._mailbox.take(with_logprobs=self.params.logprobs is not None)
        if self.outcome is not None and self.outcome.error is not None:
            raise copy(self.outcome.error)
        raise StopAsyncIteration

    # ---- what the session tells it; synchronous ---------------------------------------------------------------

    def receive(self, row: TokensRow) -> Outcome | None:
        """Take a row's tokens into the answer. The outcome, if it is the last row, or completes a stop string."""
        answer = self.answer
        assert answer is not None, "rows come after the commit"
        if row.finish_reason is not FinishReason.ABORT:
            self.times.on_tokens(row.usage, are_first=not answer.token_ids)
        if row.finish_reason is None:
            delta = answer.feed(row.token_ids)
        else:
            delta = answer.finish(row.token_ids, ended_by_token=row.finish_reason is FinishReason.STOP)
        self._mailbox.add(delta.text)
        self._mailbox.token_ids.extend(row.token_ids[: delta.num_tokens])
        if row.logprobs is not None:
            self._mailbox.logprobs.extend(row.logprobs[: delta.num_tokens])
            self._logprobs.extend(row.logprobs[: delta.num_tokens])
        self._news.set()
        if delta.stopped:
            return Outcome(FinishReason.STOP)
        if row.finish_reason is FinishReason.ABORT:
            return Outcome(FinishReason.ABORT, self.abort_cause)
        return Outcome(row.finish_reason) if row.finish_reason is not None else None

    def flush(self) -> None:
        """No more rows will come: what a stop string or a character held back belongs to the tokens that came."""
        if self.answer is not None:
            self._mailbox.add(self.answer.flush())

    def decide(self, outcome: Outcome) -> None:
        """The first outcome is the outcome."""
        if self.outcome is None:
            self.outcome = outcome
        self._news.set()

    def tell_times(self) -> None:
        """It ran to its end: the observers hear how long it took."""
        assert self.prepared is not None and self.answer is not None, "rows come after the commit"
        self.times.finish(len(self.prepared.token_ids), len(self.answer.token_ids))

    def settle(self) -> None:
        """The worker is done with the request, or will never hear of it."""
        self.entering.cancel()
        self.settled.set()
