"""The text of one answer, as its tokens come: detokenized, cut at a stop string, without the end token."""

from __future__ import annotations

from collections.abc import Iterable

from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import TokenIds, token_ids
from trioengine.text.tokenizer import Detokenizer, Tokenizer


class OutputText:
    """Makes text of tokens: `token_ids` are those taken, `texts` what they added one after another."""

    __slots__ = ("_detokenizer", "_end_token_ids", "_matcher", "_min_tokens", "texts", "token_ids")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
        self.token_ids: TokenIds = token_ids()
        self.texts: list[str] = []  # none is empty
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens  # no stop string counts that ends before
        self._end_token_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def feed(self, ids: TokenIds) -> bool:
        """Take tokens, up to the one that completes a stop string. Returns whether one did."""
        if self._matcher is None:
            self.token_ids.extend(ids)
            self._add(self._detokenizer.feed(ids))
            return False
        for token_id in ids:
            self.token_ids.append(token_id)
            text, stopped = self._match(self._matcher, self._detokenizer.feed((token_id,)))
            self._add(text)
            if stopped:
                return True
        return False

    def finish(self, ids: TokenIds, *, ended_by_token: bool) -> bool:
        """Take the last tokens, and give what was held back; an end token is kept out of the text.

        Returns whether a stop string was completed.
        """
        ended = ended_by_token and len(ids) > 0 and ids[-1] in self._end_token_ids
        if self.feed(ids[:-1] if ended else ids) or self.flush():
            return True
        if ended:
            self.token_ids.append(ids[-1])
        return False

    def flush(self) -> bool:
        """Give what is held back, when no more tokens come. Returns whether that completed a stop string."""
        text, stopped = self._detokenizer.flush(), False
        if self._matcher is not None:
            text, stopped = self._match(self._matcher, text)
            text += "" if stopped else self._matcher.flush()
        self._add(text)
        return stopped

    def _match(self, matcher: StopMatcher, piece: str) -> tuple[str, bool]:
        if len(self.token_ids) < self._min_tokens:
            return matcher.pass_over(piece), False
        return matcher.feed(piece)

    def _add(self, text: str) -> None:
        if text:
            self.texts.append(text)


class StopMatcher:
    """Finds the first stop string, also across pieces, and holds back only what could become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """The text that is certain, and whether a stop string is complete: then that text ends right before it.

        The stop that is complete first wins, and of those that end together the one that began first.
        """
        text, seen = self._held + piece, len(self._held)  # what ends in the part that is seen was passed over
        places = [(stop, text.find(stop, max(0, seen + 1 - len(stop)))) for stop in self._stops]
        ends = [(at + len(stop), at) for stop, at in places if at >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        return self.pass_over(piece), False

    def pass_over(self, piece: str) -> str:
        """The text that is certain, where a stop string may begin in this piece, but none that ends in it counts."""
        text = self._held + piece
        keep = max(self._overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more pieces come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
