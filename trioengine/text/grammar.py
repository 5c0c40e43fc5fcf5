"""Grammars compiled by llguidance: checks for requests, and matchers that follow an answer token by token.

Compiling is bounded by LIMITS: a grammar beyond them is refused. It releases the GIL, as computing
a mask does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from trioengine.core.errors import RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.core.wording import excerpt
from trioengine.text.tokenizer import Tokenizer

LIMITS = LLParserLimits(verbose_errors=False)
_KEPT = 64  # compiled grammars


class MatcherFailed(Exception):
    """A grammar goes beyond the limits while an answer follows it."""


def check_grammar(grammar: Grammar) -> None:
    """Compile the grammar for no tokenizer. Raises RequestRejected(code="invalid_grammar")."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar.source, limits=LIMITS)
    if is_error:
        raise _invalid(messages[0])


def _invalid(message: str) -> RequestRejected:
    return RequestRejected("invalid_grammar", f"grammar: {excerpt(message)}", param="grammar")


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
        return self._tokenizer.encode_ordinary(text if isinstance(text, str) else bytes(text).decode(errors="replace"))


class Matcher:
    """How far an answer has followed its grammar."""

    __slots__ = ("_matcher", "_num_taken")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_taken = 0

    def advance(self, output: Sequence[int]) -> None:
        """Take in the tokens of the answer beyond those that it has taken in already."""
        if len(output) > self._num_taken:
            self._matcher.consume_tokens(list(output[self._num_taken :]))
            self._num_taken = len(output)

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow but an end token."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> bytes:
        """The tokens that may come next: a bit for each, the first token's lowest. Raises MatcherFailed."""
        mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise MatcherFailed(excerpt(self._matcher.get_error()))
        return mask
