"""A generation over a connection: one request as its reader sees it, like the engine's."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trioengine.actors.readable import Readable
from trioengine.aio.deadline import Deadline
from trioengine.client.media import Media
from trioengine.client.prompt import Message
from trioengine.core.arguments import PromptPlaces
from trioengine.core.errors import EngineError, Outcome, TimedOut
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Chunk, Completion, Usage

if TYPE_CHECKING:
    from trioengine.client.session import Session


class Stage(enum.Enum):
    """Where its response stands, as the server says."""

    NONE = "none"  # nothing is asked, or what was asked is over
    ASKED = "asked"
    CREATED = "created"
    ADMITTED = "admitted"  # the engine has taken the request


class Generation(Readable["Session"]):
    """One request: `async with session.generate(...) as generation: async for chunk in generation`.

    Entering asks the server; what is refused is raised there, and TimedOut if the timeout passes on the way. Iterating
    ends normally for stop, length and abort; after the last delta it raises the typed error of a failed request, and
    TimedOut for a request that its timeout has aborted. Leaving before the outcome aborts the request:
    its turn is taken back at once (`keep_partial` keeps what came until then), and leaving waits until the server has
    let go of it, or the timeout passes. When the scope is cancelled, leaving does the same but does not wait.
    Cancelling a read loses nothing: the next read goes on. Chunks and completion have no token ids and no logprobs:
    these are not sent.
    """

    def __init__(
        self,
        session: Session,
        prompt: object,
        params: SamplingParams,
        *,
        media: Sequence[Media] = (),
        keep_partial: bool,
        deadline: Deadline,
        wait: bool | None,
        label: str | None = None,
    ) -> None:
        super().__init__(session, params, keep_partial=keep_partial, deadline=deadline, wait=wait, label=label)
        self.prompt: Any = prompt  # until it is sent, as the media
        self.media = media
        self.response_id: str | None = None  # the server's
        # The session's part: it alone writes these.
        self.stage = Stage.NONE
        self.messages: list[Message] = []
        self.item_ids: list[str] = []  # of these
        self.places = PromptPlaces.of(prompt, media)
        self.answer_id: str | None = None  # the item of the answer
        self.ask_id = ""  # the event that asked for the response
        self.problem: EngineError | None = None  # what an error event said of it
        self.refusal: EngineError | None = None  # why the engine does not take it
        self.spoiled: EngineError | None = None  # why its prompt is not what it should be
        self.abort_cause: Cause | None = None
        self.cancel_sent = False
        self.is_kept = False
        self.usage = Usage(0, 0, 0)
        self.dropped_turns = 0
        self._pieces: list[str] = []  # of the answer
        self._unread: list[str] = []  # of these

    @property
    def _progress(self) -> str:
        return "waiting" if self.stage is Stage.NONE else self.stage.value

    def take_id(self, ids: Iterator[int]) -> None:
        """Take the next one, unless it has one."""
        if self._request_id is None:
            self.request_id = next(ids)

    def timed_out(self) -> TimedOut:
        if self.refusal is None:
            return super().timed_out()
        error = self.deadline.passed(f"while waiting: {self.refusal}", self.completion)
        error.__cause__ = self.refusal
        return error

    @property
    def text(self) -> str:
        """What came until now, read or not."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _answer(self, outcome: Outcome) -> Completion:
        return Completion(
            self.request_id,
            self.text,
            (),
            None,
            outcome.finish_reason,
            outcome.cause,
            self.usage,
            dropped_turns=self.dropped_turns,
        )

    @property
    def _has_unread(self) -> bool:
        return bool(self._unread)

    def take(self) -> Chunk:
        text, self._unread = "".join(self._unread), []
        return Chunk(text, ())

    # ---- what the session tells it; synchronous -------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to end; the server may not have heard of it."""
        return self.outcome is not None or self.abort_cause is not None

    def receive(self, text: str) -> None:
        if self.outcome is None and self.spoiled is None and text:
            self._pieces.append(text)
            self._unread.append(text)
            self._changes.notify()

    def notify(self) -> None:
        """Its stage has changed."""
        self._changes.notify()

    async def answered(self) -> None:
        """Wait until the server has said whether the engine takes the request."""
        while self.stage is not Stage.NONE and (self.stage is not Stage.ADMITTED or self.spoiled is not None):
            await self._changes.wait()
