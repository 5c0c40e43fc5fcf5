"""The text of one request's output: detokenized as tokens arrive, and cut at a stop string or the end token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import TokenIds, token_ids
from trioengine.text.stop_strings import StopMatcher
from trioengine.text.tokenizer import Tokenizer

_MAX_PENDING = 16  # tokens; more than one character takes with byte fallback


class OutputText:
    """Converts output tokens to text: `token_ids` are the tokens taken, `texts` the pieces that they added."""

    __slots__ = (
        "_detokenizer",
        "_end_token_ids",
        "_matcher",
        "_min_tokens",
        "_stop_token_ids",
        "stop_reason",
        "texts",
        "token_ids",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
        self.token_ids: TokenIds = token_ids()
        self.texts: list[str] = []  # never empty strings
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self.stop_reason: int | str | None = None  # the stop string, or the stop token, that ended the answer
        self._min_tokens = params.min_tokens  # a stop string that ends before is ignored
        eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids) - eos
        self._end_token_ids = self._stop_token_ids | eos

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)

    def feed(self, ids: TokenIds) -> bool:
        """Take tokens, up to the one that completes a stop string. Returns whether one did."""
        if self._matcher is None:
            self.token_ids.extend(ids)
            if text := self._detokenizer.feed(ids):
                self.texts.append(text)
            return False
        for token_id in ids:
            self.token_ids.append(token_id)
            text, stopped = self._match(self._matcher, self._detokenizer.feed((token_id,)))
            if text:
                self.texts.append(text)
            if stopped:
                return True
        return False

    def finish(self, ids: TokenIds, *, ended_by_token: bool) -> bool:
        """Take the last tokens and add all held text; an end token is not part of the text.

        Returns whether a stop string was completed.
        """
        ended = ended_by_token and len(ids) > 0 and ids[-1] in self._end_token_ids
        if self.feed(ids[:-1] if ended else ids) or self.flush():
            return True
        if ended:
            self.token_ids.append(ids[-1])
            self.stop_reason = ids[-1] if ids[-1] in self._stop_token_ids else None
        return False

    def flush(self) -> bool:
        """Add the text that is held back, after the last token. Returns whether it completes a stop string."""
        text, stopped = self._detokenizer.flush(), False
        if self._matcher is not None:
            text, stopped = self._match(self._matcher, text)
            text += "" if stopped else self._matcher.flush()
        if text:
            self.texts.append(text)
        return stopped

    def _match(self, matcher: StopMatcher, piece: str) -> tuple[str, bool]:
        if len(self.token_ids) < self._min_tokens:
            return matcher.ignore(piece), False
        text, stopped = matcher.feed(piece)
        self.stop_reason = matcher.found
        return text, stopped


class Detokenizer:
    """Token ids to text as they arrive; the pieces add up to the text that `Tokenizer.decode` gives for all the ids."""

    __slots__ = (
        "_bytes_of",
        "_context",
        "_is_byte_level",
        "_pending",
        "_rest",
        "_skip_special_tokens",
        "_strips_space",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._is_byte_level = tokenizer.is_byte_level
        table = tokenizer.ordinary_bytes if skip_special_tokens else tokenizer.token_bytes
        self._bytes_of = table.__getitem__
        self._rest = b""  # byte-level tokenizers: the beginning of a character
        self._strips_space = tokenizer.strips_space  # and whether a space that comes next is left out of the text
        self._context: list[int] = []  # other tokenizers: the last ids with text, which the next text may depend on
        self._pending: list[int] = []  # and the ids whose text is not complete

    @property
    def is_pending(self) -> bool:
        """Whether some of the ids have not given their text yet."""
        return bool(self._rest or self._pending)

    def feed(self, ids: Sequence[int]) -> str:
        """Take ids, and return the text that they complete: whole characters only."""
        if self._is_byte_level:
            data = self._bytes_of(ids[0]) if len(ids) == 1 else b"".join(map(self._bytes_of, ids))
            if self._rest:
                data = self._rest + data
            if self._strips_space and data:
                data, self._strips_space = data.removeprefix(b" "), False
            text, num_decoded = codecs.utf_8_decode(data, "replace")
            self._rest = data[num_decoded:]
            return text
        return "".join([self._feed_one(token_id) for token_id in ids])

    def flush(self) -> str:
        """Return the rest after the last id: U+FFFD for an incomplete character."""
        if self._pending:
            return self._give()
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")

    def _feed_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING:
            return ""  # possibly an incomplete character
        return self._give()

    def _new_text(self) -> str:
        """Decode the pending ids behind their context: a tokenizer may join or strip at the borders."""
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip_special_tokens)
        after = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=self._skip_special_tokens)
        return after[len(before) :]

    def _give(self) -> str:
        text = self._new_text()
        self._context = self._pending if text else self._context + self._pending
        self._pending = []
        return text
