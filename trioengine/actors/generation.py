"""A generation: one request as its reader sees it, in chunks that merge what was not read yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trioengine.actors.media import Media
from trioengine.actors.readable import Readable
from trioengine.actors.request_times import RequestTimes
from trioengine.aio.deadline import Deadline
from trioengine.core.errors import Outcome
from trioengine.core.ledger import RequestState
from trioengine.core.messages import TokensRow
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Chunk, Completion, FinishReason, Logprobs, Usage
from trioengine.text.conversation import Prepared, Prompt
from trioengine.text.output import OutputText

if TYPE_CHECKING:
    from trioengine.actors.session import Session


@dataclass(slots=True)
class Losses:
    """Deaths of the worker with the request in flight."""

    resumed: int = 0  # how often it went on after one
    deaths: int = 0  # that count against it
    deaths_alone: int = 0  # while it was tried alone
    num_tokens: int = -1  # that it had at the last one
    is_new: bool = False  # it has not gone on since the last one


class Generation(Readable["Session"]):
    """One request: `async with session.generate(...) as generation: async for chunk in generation`.

    Entering reserves, prepares and posts the request; what is refused is raised there, and TimedOut if the timeout
    passes on the way. Iterating ends normally for stop, length and abort; after the last delta it raises the typed
    error of a failed request, and TimedOut for a request that its timeout has aborted. Leaving before
    the outcome aborts the request: its turn is taken back at once (`keep_partial` keeps what came until then), and
    leaving waits until the worker has let go of it, or the timeout passes. When the scope is cancelled, leaving does
    the same but does not wait. Cancelling a read loses nothing: the next read goes on.
    """

    __slots__ = (
        "_logprobs",
        "_num_texts_read",
        "_num_tokens_read",
        "_offer",
        "abort_cause",
        "answer",
        "losses",
        "media",
        "prepared",
        "prompt",
        "resolved",
        "stand",
        "times",
        "usage",
        "weight_versions",
    )

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        params: SamplingParams,
        *,
        media: Sequence[Media] = (),
        keep_partial: bool,
        deadline: Deadline,
        wait: bool | None,
        label: str | None = None,
    ) -> None:
        super().__init__(session, params, keep_partial=keep_partial, deadline=deadline, wait=wait, label=label)
        self.prompt: Any = prompt  # of any type, until it is prepared; then it is dropped, as the media are
        self.media = media
        # The session's part: it alone writes these.
        self.stand = RequestState.PREPARING
        self.prepared: Prepared | None = None
        self.answer: OutputText | None = None
        self.abort_cause = Cause.CLIENT
        self.resolved: SamplingParams | None = None  # as the worker was told
        self.usage: Usage | None = None  # of its first attachment that got a token
        self.weight_versions: list[int] = []
        self.losses = Losses()
        self.times = RequestTimes(session.observers)
        self._logprobs: list[Logprobs] = []  # one a token, if asked for
        self._num_tokens_read = 0  # of the answer
        self._num_texts_read = 0
        self._offer: Callable[[], bool] = _decline
        for observer in session.observers:
            observer.request_created(self)

    @property
    def _progress(self) -> str:
        return self.stand.value

    def _answer(self, outcome: Outcome) -> Completion:
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
            finish_reason=outcome.finish_reason,
            cause=outcome.cause,
            usage=Usage(prompt_tokens, len(ids), cached_tokens, *times),
            resumed=self.losses.resumed,
            weight_versions=tuple(self.weight_versions),
            dropped_turns=self.prepared.dropped_turns if self.prepared is not None else 0,
        )

    @property
    def _has_unread(self) -> bool:
        answer = self.answer
        return answer is not None and (
            self._num_tokens_read < len(answer.token_ids) or self._num_texts_read < len(answer.texts)
        )

    def take(self) -> Chunk:
        first = self._num_tokens_read
        text = self.take_text()
        ids = tuple(self.answer.token_ids[first:]) if self.answer is not None else ()
        return Chunk(text, ids, tuple(self._logprobs[first:]) if self.params.logprobs is not None else None)

    def take_text(self) -> str:
        """What is unread, as its text alone: its tokens are read with it."""
        answer = self.answer
        if answer is None:
            return ""
        texts = answer.texts[self._num_texts_read :]
        self._num_tokens_read, self._num_texts_read = len(answer.token_ids), len(answer.texts)
        return "".join(texts)

    def offer_to(self, take: Callable[[], bool]) -> None:
        """Until there is an outcome, call this in the step in which something came to be read: nobody need be woken.

        It must not wait. True: it has called `take`; False: the reader is to be woken. An exception in it ends the
        session as a crash does.
        """
        if self.outcome is None:
            self._offer = take

    # ---- what the session tells it; synchronous ---------------------------------------------------------------

    def receive(self, row: TokensRow, now: float) -> Outcome | None:
        """Take a row's tokens into the answer. The outcome, if it is the last row, or completes a stop string."""
        answer = self.answer
        assert answer is not None, "rows come after the commit"
        if row.finish_reason is not FinishReason.ABORT:
            self.times.on_tokens(now, row.usage, are_first=not answer.token_ids)
        if row.finish_reason is None:
            stopped = answer.feed(row.token_ids)
        else:
            stopped = answer.finish(row.token_ids, ended_by_token=row.finish_reason is FinishReason.STOP)
        if row.logprobs is not None:  # those of the tokens that were taken
            self._logprobs.extend(row.logprobs[: len(answer.token_ids) - len(self._logprobs)])
        if stopped:
            return Outcome(FinishReason.STOP)
        if row.finish_reason is FinishReason.ABORT:
            return Outcome(FinishReason.ABORT, self.abort_cause)
        return Outcome(row.finish_reason) if row.finish_reason is not None else None

    def tell_reader(self) -> None:
        """Rows were received."""
        if not self._offer():
            self._changes.notify()

    def decide(self, outcome: Outcome) -> None:
        """The first outcome is the outcome, which the reader is told of itself."""
        self._offer = _decline
        super().decide(outcome)

    @property
    def num_tokens(self) -> int:
        """That were delivered."""
        return len(self.answer.token_ids) if self.answer is not None else 0

    def note_weights(self, version: int) -> None:
        """Tokens came that were computed with these."""
        if not self.weight_versions or self.weight_versions[-1] != version:
            self.weight_versions.append(version)

    def flush(self) -> None:
        """No more rows will come: what a stop string or a character held back belongs to the tokens that came."""
        if self.answer is not None:
            self.answer.flush()

    def tell_times(self) -> None:
        """It ran to its end: the observers hear how long it took."""
        assert self.prepared is not None and self.answer is not None, "rows come after the commit"
        self.times.finish(len(self.prepared.token_ids), len(self.answer.token_ids))


def _decline() -> bool:
    return False
