"""Mutants of answers that follow a grammar: of the state of a sequence's matcher, and of grammars that compile."""

from __future__ import annotations

from typing import Any

from mutant import Mutant, replaced

from trioengine.core.messages import INVALID_GRAMMAR, StopSession
from trioengine.text.grammar import Matcher
from trioengine.worker.scheduling.block_manager import BlockManager
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.grammars import GrammarCompiled
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus


def _begin_anew(take_compiled: Any) -> Any:
    def mutant(self: EngineCore, compiled: GrammarCompiled) -> Any:
        if isinstance(compiled.constraint, Matcher):
            compiled.constraint._num_taken = compiled.sequence.num_output_tokens
        return take_compiled(self, compiled)

    return mutant


def _take_twice(release: Any) -> Any:
    def mutant(self: BlockManager, sequence: Sequence) -> None:
        release(self, sequence)
        if sequence.status is SequenceStatus.RUNNING and isinstance(sequence.constraint, Matcher):  # not over
            sequence.constraint._num_taken = max(0, sequence.constraint._num_taken - 1)

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
        sequence = compiled.sequence
        if sequence.status is SequenceStatus.FINISHED and compiled.constraint is None:
            self._take_back(sequence)
            return [sequence.failure(INVALID_GRAMMAR, compiled.error)]
        return take_compiled(self, compiled)

    return mutant


GRAMMAR_MUTANTS = (
    Mutant(
        "F72",
        "an answer that continues on another worker follows its grammar from the beginning",
        replaced(EngineCore, "_take_compiled", _begin_anew),
        shows="the model's|of none of the weights|goes on|the chunks give|a worker failed: .*MatcherFailed",
        machine="PowerMachine",
    ),
    Mutant(
        "F73",
        "a grammar takes the last token of a preempted sequence twice",
        replaced(BlockManager, "release", _take_twice),
        shows="the model's|the whole answer|nothing was wrong, and .*satisfy the grammar",
    ),
    Mutant(
        "F74",
        "an abort does not end a request whose grammar compiles",
        replaced(EngineCore, "_stop_session", _leave_the_compiling),
        shows="it was stopped, and compiles|a stopped request goes on",
    ),
    Mutant(
        "F75",
        "the error of a grammar whose request has ended is applied",
        replaced(EngineCore, "_take_compiled", _apply_to_the_ended),
        shows="KeyError|nothing was wrong|is not in flight|the engine broke the protocol|is sent for|the worker sent",
    ),
)
