"""Grammars compiled by llguidance: checks for requests, and matchers that follow an answer token by token.

Compiling is bounded by LIMITS, and a grammar that goes beyond is refused. It releases the GIL, as the computation of a
mask does.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar, GrammarFailed
from trioengine.core.grammar_limits import invalid
from trioengine.core.wording import excerpt
from trioengine.text.tokenizer import Tokenizer

LIMITS = LLParserLimits(
    max_items_in_row=8_000,
    initial_lexer_fuel=200_000,
    max_grammar_size=100_000,
    step_lexer_fuel=20_000,
    step_max_items=20_000,
    verbose_errors=False,
)
_KEPT = 64  # compiled grammars
_TOO_COMPLEX = re.compile(r"fuel|limit|too (?:big|large|many|complex)|current row has|max is", re.IGNORECASE)


def check_grammar(grammar: Grammar) -> None:
    """Compile the grammar for no tokenizer. Raises RequestRejected(code="invalid_grammar")."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar.source, limits=LIMITS)
    if is_error:
        raise _invalid(messages[0])


def _invalid(message: str) -> RequestRejected:
    return invalid(f"grammar: {_describe(message)}")


def _describe(message: str) -> str:
    """Return the compiler's message in the words of its user, to whom the names of its limits mean nothing."""
    if _TOO_COMPLEX.search(message):
        return "it is too complex; use fewer or simpler patterns, alternatives and repetitions"
    return "nothing can match it" if message.startswith("NoExtension") else excerpt(message)


class Compiler:
    """Compiles grammars for the tokens of one model; it keeps those that it compiled last. For one thread."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        """Takes about a quarter of a second for 50,000 tokens."""
        ends = [token_id for token_id in eos_token_ids if token_id < tokenizer.vocab_size]
        self._tokens = LLTokenizer(_Vocabulary(tokenizer, ends), eos_token=ends or None)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of an answer. Raises RequestRejected(code="invalid_grammar")."""
        matcher = self._compiled.get(grammar.source)
        if matcher is None:
            matcher = LLMatcher(self._tokens, grammar.source, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise _invalid(matcher.get_error())
            matcher.compute_bitmask()  # the slowest one, and the only one of grammars that are too complex or empty
            if matcher.is_error():
                raise _invalid(matcher.get_error())
            self._compiled[grammar.source] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar.source)
        return Matcher(matcher.deep_copy())


class _Vocabulary(TokenizerWrapper):
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = sorted(tokenizer.special_ids & set(ids))
        self.tokens = [tokenizer.token_bytes[token_id] for token_id in ids]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else tokenizer.vocab_size - 1

    def __call__(self, text: Any) -> list[int]:
        return self._tokenizer.encode_inside(text if isinstance(text, str) else bytes(text).decode(errors="replace"))


class Matcher:
    """How far an answer has followed its grammar."""

    __slots__ = ("_mask", "_matcher", "_num_taken")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_taken = 0
        self._mask: bytes | None = None  # of the next token, once it is computed

    def advance(self, output: Sequence[int]) -> None:
        """Take in the tokens of the answer beyond those that it has taken in already."""
        if len(output) > self._num_taken:
            self._matcher.consume_tokens(list(output[self._num_taken :]))
            self._num_taken = len(output)
            self._mask = None

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow but an end token."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> bytes:
        """The tokens that may come next: a bit for each, the first token's lowest. Raises GrammarFailed."""
        if self._mask is None:
            mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise GrammarFailed(_describe(self._matcher.get_error()))
            self._mask = mask
        return self._mask

    def forced(self) -> int | None:
        """The next token if only one may come; None too if the grammar fails, which `allowed` raises.

        Where text is forced, llguidance allows one token: that with which the tokenizer writes it.
        """
        try:
            bits = int.from_bytes(self.allowed(), "little")
        except GrammarFailed:
            return None
        return bits.bit_length() - 1 if bits and bits & (bits - 1) == 0 else None
