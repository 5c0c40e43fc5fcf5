"""What a reader gets: an answer in pieces, and as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trioengine.core.bounds import brief
from trioengine.core.messages import FinishReason, Logprobs, Usage
from trioengine.core.outcome import Cause
from trioengine.core.restricted import Restricted


class Chunk(NamedTuple):
    """What came since the last chunk; `logprobs` holds one `{token_id: logprob}` a token, if asked for.

    Of a server that is reached over the network there are no token ids: they are ().
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion(Restricted, refuses=("for", "async for")):
    """A whole answer. `token_ids` include the end token, `text` does not; `cause` is set for an abort.

    `resumed` says how often it went on with another worker after one was lost, `weight_versions` which weights it was
    computed with, in their order. Of a server that is reached over the network they are 0 and ().
    `dropped_turns` is how many of the oldest turns were left out of its prompt.
    """

    _noun = "a completion"
    _usage = "it is a whole answer; `session.generate(...)` gives one in chunks"

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None
    finish_reason: FinishReason
    cause: Cause | None
    usage: Usage
    resumed: int = 0
    weight_versions: tuple[int, ...] = ()
    dropped_turns: int = 0

    def __repr__(self) -> str:
        ended = str(self.finish_reason) if self.cause is None else f"{self.finish_reason} ({self.cause})"
        tokens = f"{self.usage.prompt_tokens} + {self.usage.completion_tokens} tokens"
        return f"<Completion {self.request_id} {brief(self.text)} {ended}, {tokens}>"
