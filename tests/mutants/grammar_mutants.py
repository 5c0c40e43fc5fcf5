"""Mutants of answers that follow a grammar: of the state of a sequence's matcher, and of grammars that compile."""

from __future__ import annotations

from typing import Any

from trioengine.core.messages import StopSession
from trioengine.text.grammar import Matcher
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.grammars import GrammarCompiled
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Sequence


def _begin_anew(take_compiled: Any) -> Any:
    def mutant(self: EngineCore, compiled: GrammarCompiled) -> Any:
        if isinstance(compiled.constraint, Matcher):
            compiled.constraint._num_taken = compiled.sequence.num_output_tokens
        return take_compiled(self, compiled)

    return mutant


def _take_twice(preempt: Any) -> Any:
    def mutant(self: Scheduler, sequence: Sequence) -> None:
        preempt(self, sequence)
        if isinstance(sequence.constraint, Matcher) and sequence.constraint._num_taken:
            sequence.constraint._num_taken -= 1

    return mutant


def _leave_the_compiling(stop_session: Any) -> Any:
    def mutant(self: EngineCore, message: StopSession) -> Any:
        sequence = self._sessions[message.session].sequence if message.session in self._sessions else None
        if sequence is not None and sequence.is_compiling:
            return []
        return stop_session(self, message)

    return mutant


def _apply_to_the_ended(take_compiled: Any) -> Any:
    def mutant(self: EngineCore, compiled: GrammarCompiled) -> Any:
        status, compiled.sequence.status = compiled.sequence.status, compiled.sequence.status.__class__.PARKED
        try:
            return take_compiled(self, compiled)
        finally:
            compiled.sequence.status = status

    return mutant
