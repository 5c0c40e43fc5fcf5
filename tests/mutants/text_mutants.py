"""Bugs in prompts of token ids, in the ends of answers, and in their texts."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import Any

from mutant import Mutant, replaced

from trioengine.text.conversation import Conversation
from trioengine.text.output import OutputText
from trioengine.text.stop_strings import StopMatcher
from trioengine.worker.scheduling.sequence import Sequence


def _forget_min_tokens(finish_reason: Any) -> Any:
    def mutated(sequence: Sequence, max_sequence_len: int) -> Any:
        params = sequence.params
        sequence.params = replace(params, min_tokens=0)
        try:
            return finish_reason(sequence, max_sequence_len)
        finally:
            sequence.params = params

    return mutated


def _forget_the_held_text(feed: Any) -> Any:
    def mutated(matcher: StopMatcher, piece: str) -> Any:
        held, matcher._held = matcher._held, ""
        text, stopped = feed(matcher, piece)
        return held + text, stopped

    return mutated


def _stop_too_early(match: Any) -> Any:
    return lambda output, matcher, piece: matcher.feed(piece)


def _lose_the_held_text(flush: Any) -> Any:
    def mutated(output: OutputText) -> bool:
        if output._matcher is not None:
            output._matcher._held = ""
        stopped: bool = flush(output)
        return stopped

    return mutated


def _lose_the_first_token(prepare: Any) -> Any:
    def mutated(conversation: Conversation, prompt: Tokens[int]) -> Any:
        return prepare(conversation, prompt[1:] if len(prompt) > 8 else prompt)

    return mutated


def _stay_raw(replace: Any) -> Any:
    def mutated(conversation: Conversation, history: Any) -> None:
        raw_ids = conversation._raw_ids
        replace(conversation, history)
        conversation._raw_ids = raw_ids

    return mutated


TEXT_MUTANTS = (
    Mutant(
        "F49",
        "an end token ends an answer that is shorter than min_tokens",
        replaced(Sequence, "finish_reason", _forget_min_tokens),
        shows="the model's is|the whole answer",
    ),
    Mutant(
        "F49b",
        "a stop string ends an answer that is shorter than min_tokens",
        replaced(OutputText, "_match", _stop_too_early),
        shows="the model's is|is not part of the model's",
    ),
    Mutant(
        "F50",
        "a stop string that comes in two chunks is missed",
        replaced(StopMatcher, "feed", _forget_the_held_text),
        shows="the model's is|is not part of the model's",
    ),
    Mutant(
        "F50b",
        "the text that may begin a stop string is lost at the end",
        replaced(OutputText, "flush", _lose_the_held_text),
        shows="the model's is|the text of an abort|the chunks give|the history is",
    ),
    Mutant(
        "F51",
        "a prompt of token ids loses its first token",
        replaced(Conversation, "_prepare_raw", _lose_the_first_token),
        shows="the model's|are counted|are cached|the prompt has",
    ),
    Mutant(
        "F64",
        "a conversation takes no messages after token ids that were replaced by a history",
        replaced(Conversation, "replace", _stay_raw),
        shows="its turns are of one kind",
    ),
)
