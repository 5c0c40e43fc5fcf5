"""Grammars are compiled beside the steps; sequences wait for theirs out of the line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trioengine.core.errors import InvariantError, RequestRejected
from trioengine.core.grammar import Grammar
from trioengine.worker.scheduling.sequence import Constraint, Sequence


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """An event of the worker: the compiler is done with the grammar of a sequence, which may have ended."""

    sequence: Sequence
    constraint: Constraint | None
    error: str = ""  # why `constraint` is None


class Compiler(Protocol):
    """Compiles beside the steps."""

    def submit(self, sequence: Sequence) -> None:
        """Compile its grammar: one GrammarCompiled is reported, not before this returns; none if it has ended."""
        ...


def compile_for(sequence: Sequence, make: Callable[[Grammar], Constraint]) -> GrammarCompiled:
    """Compile the grammar of a sequence, in a compiler's thread; never raises: any exception becomes the error."""
    try:
        if sequence.params.grammar is None:
            raise InvariantError(f"request {sequence.request} has no grammar")
        return GrammarCompiled(sequence, make(sequence.params.grammar))
    except RequestRejected as exc:
        return GrammarCompiled(sequence, None, exc.message)
    except BaseException as exc:  # a panic of the compiler is not an Exception
        return GrammarCompiled(sequence, None, f"{type(exc).__name__}: {exc}")


class NoCompiler:
    """The compiler of a worker that gets no grammars."""

    def submit(self, sequence: Sequence) -> None:
        raise InvariantError(f"request {sequence.request} has a grammar, and there is no compiler")
