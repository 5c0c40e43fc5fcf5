"""Token ids to text, as they come: never a part of a character, and nothing lost."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from trioengine.text.tokenizer import Tokenizer

_MAX_PENDING = 16  # tokens that a character of a tokenizer with byte fallback can take, and more


class Detokenizer:
    """The texts given add up to what the tokenizer decodes from all the ids at once."""

    __slots__ = (
        "_bytes_of",
        "_context",
        "_is_byte_level",
        "_pending",
        "_rest",
        "_skip_special_tokens",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._is_byte_level = tokenizer.is_byte_level
        self._bytes_of = tokenizer.ordinary_bytes_of if skip_special_tokens else tokenizer.bytes_of
        self._rest = b""  # of a byte-level tokenizer: the beginning of a character
        self._context: list[int] = []  # of any other: ids whose text was given, kept for what follows them
        self._pending: list[int] = []  # and ids whose text was not

    @property
    def is_pending(self) -> bool:
        """Whether ids were fed whose text is not given yet."""
        return bool(self._rest or self._pending)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        if self._is_byte_level:
            data = self._rest + self._bytes_of(ids)
            text, num_decoded = codecs.utf_8_decode(data, "replace")
            self._rest = data[num_decoded:]
            return text
        return "".join([self._feed_one(token_id) for token_id in ids])

    def flush(self) -> str:
        """What is left when no more ids come: U+FFFD for a character that was never completed."""
        if self._pending:
            return self._give()
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")

    def _feed_one(self, token_id: int) -> str:
        """Decode the new ids behind some that came before: a tokenizer may join or strip at the borders."""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING:
            return ""  # perhaps a character that is not complete
        return self._give()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=self._skip_special_tokens)
        after = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=self._skip_special_tokens)
        return after[len(before) :]

    def _give(self) -> str:
        text = self._new_text()
        if text:
            self._context, self._pending = self._pending, []
        else:
            self._context, self._pending = self._context + self._pending, []
        return text
