"""Grammars for the toy model: a compiler for its tokens, the choice of a token, and a follower for the reference."""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import TYPE_CHECKING

from trioengine.core.grammar import Grammar
from trioengine.testing.toy_tokenizer import END_OF_TEXT, IM_END, toy_tokenizer_json
from trioengine.text.tokenizer import Tokenizer
from trioengine.worker.scheduling.sequence import Constraint

if TYPE_CHECKING:
    from trioengine.text.grammar import Compiler


class ToyFollower:
    """Follows one answer from its beginning, apart from any worker."""

    def __init__(self, grammar: Grammar) -> None:
        self._constraint = toy_compile(grammar)
        self._taken: list[int] = []

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow but an end token."""
        return self._constraint.is_complete

    def replacement(self, token_id: int, unwanted: Container[int] = ()) -> int:
        """The token that comes where this is the model's next one."""
        return toy_allowed(token_id, self._constraint.allowed(), unwanted)

    def take(self, token_id: int, unwanted: Container[int] = ()) -> int:
        """Take the model's next token as far as it is allowed, or else its replacement, and return that."""
        self._taken.append(self.replacement(token_id, unwanted))
        self._constraint.advance(self._taken)
        return self._taken[-1]


def toy_compile(grammar: Grammar) -> Constraint:
    """Compile a grammar for the toy model. Raises RequestRejected."""
    return _compiler().compile(grammar)


@cache
def _compiler() -> Compiler:
    from trioengine.text.grammar import Compiler  # not needed by most programs, and slow to import

    return Compiler(Tokenizer.from_json(toy_tokenizer_json(None)), (IM_END, END_OF_TEXT))


def toy_allowed(token_id: int, allowed: bytes, unwanted: Container[int] = ()) -> int:
    """The token, or where it is not allowed the next one that is, by their numbers; an unwanted one comes last."""
    if allowed[token_id >> 3] >> (token_id & 7) & 1 and token_id not in unwanted:
        return token_id
    numbers = [number for number in range(8 * len(allowed)) if allowed[number >> 3] >> (number & 7) & 1]
    wanted = [number for number in numbers if number not in unwanted] or numbers
    return min(wanted, key=lambda number: (number - token_id) % (8 * len(allowed)))
