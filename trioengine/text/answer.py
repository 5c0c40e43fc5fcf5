"""The text of one answer, as its tokens come: detokenized, cut at a stop string, without the end token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trioengine.core.messages import TokenIds, token_ids
from trioengine.core.sampling_params import SamplingParams
from trioengine.text.detokenizer import Detokenizer
from trioengine.text.stop_strings import StopMatcher
from trioengine.text.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What some tokens added: `num_tokens` of them were taken, all of them unless a stop string was completed."""

    text: str
    num_tokens: int
    stopped: bool


class Answer:
    """Takes tokens and gives text; the deltas add up to `text`, the tokens taken to `token_ids`."""

    __slots__ = ("_detokenizer", "_end_token_ids", "_matcher", "_min_tokens", "_pieces", "token_ids")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
        self.token_ids: TokenIds = token_ids()
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens  # no stop string counts that ends before
        self._end_token_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def feed(self, ids: TokenIds) -> Delta:
        """Take tokens, up to the one that completes a stop string."""
        if self._matcher is None:
            self.token_ids.extend(ids)
            return self._delta(self._detokenizer.feed(ids), len(ids), stopped=False)
        text = ""
        for count, token_id in enumerate(ids, 1):
            self.token_ids.append(token_id)
            piece, stopped = self._match(self._matcher, self._detokenizer.feed((token_id,)))
            text += piece
            if stopped:
                return self._delta(text, count, stopped=True)
        return self._delta(text, len(ids), stopped=False)

    def finish(self, ids: TokenIds, *, ended_by_token: bool) -> Delta:
        """Take the last tokens, and give what was held back; an end token is kept out of the text."""
        ended = ended_by_token and len(ids) > 0 and ids[-1] in self._end_token_ids
        delta = self.feed(ids[:-1] if ended else ids)
        if delta.stopped:
            return delta
        rest = self._flush()
        if rest.stopped:
            return Delta(delta.text + rest.text, delta.num_tokens, stopped=True)
        if ended:
            self.token_ids.append(ids[-1])
        return Delta(delta.text + rest.text, len(ids), stopped=False)

    def flush(self) -> str:
        """What is held back, when no more tokens come."""
        return self._flush().text

    def _flush(self) -> Delta:
        text, stopped = self._detokenizer.flush(), False
        if self._matcher is not None:
            text, stopped = self._match(self._matcher, text)
            text += "" if stopped else self._matcher.flush()
        return self._delta(text, 0, stopped=stopped)

    def _match(self, matcher: StopMatcher, piece: str) -> tuple[str, bool]:
        if len(self.token_ids) < self._min_tokens:
            return matcher.pass_over(piece), False
        return matcher.feed(piece)

    def _delta(self, text: str, num_tokens: int, *, stopped: bool) -> Delta:
        if text:
            self._pieces.append(text)
        return Delta(text, num_tokens, stopped)
