"""Prompt lookup: the tokens that followed an earlier occurrence of the latest ones."""

from __future__ import annotations

import gc

from helpers.toy_driver import sequence_of

from trioengine.worker.scheduling.prompt_lookup import INDEXED_A_STEP, NGRAM, NgramIndex, PromptLookup
from trioengine.worker.scheduling.runner_interface import WantedDraft


def test_the_latest_occurrence_is_continued() -> None:
    assert NgramIndex().continued([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3], 2) == [6, 7]


def test_a_draft_goes_on_with_its_own_beginning() -> None:
    assert NgramIndex().continued([9, 1, 2, 1, 2, 1, 2], 4) == [1, 2, 1, 2]
    assert NgramIndex().continued([5] * (NGRAM + 1), 3) == [5, 5, 5]


def test_nothing_is_drafted_without_an_occurrence() -> None:
    index = NgramIndex()
    for size in range(12):
        assert index.continued(list(range(size)), 4) == []


def test_the_index_grows_with_the_sequence() -> None:
    text = [each % 7 for each in range(40)]
    index = NgramIndex()
    for size in range(1, len(text)):
        draft = index.continued(text[:size], 1)
        assert draft == ([] if size < 7 + NGRAM else [text[size]])


def test_a_long_prompt_is_indexed_in_several_steps() -> None:
    """So that no step of others waits for it."""
    text = [*range(2 * INDEXED_A_STEP + 1), 5, 6, 7]
    index = NgramIndex()
    assert [index.continued(text, 2) for _ in range(3)] == [[], [], [8, 9]]


def test_a_sequence_with_new_tokens_leaves_its_room_to_others() -> None:
    texts = ([1, 2, 3, 4], [5] * 20, [1, 2, 3, 4, 1, 2, 3])
    wanted = [WantedDraft(sequence_of(number, text), 4) for number, text in enumerate(texts)]
    lookup = PromptLookup()
    assert lookup.draft(wanted, 8) == [(), (5, 5, 5, 5), (4, 1, 2, 3)]
    assert lookup.draft(wanted, 3) == [(), (5, 5), (4,)]


def test_an_index_lives_as_long_as_its_sequence() -> None:
    lookup, sequence = PromptLookup(), sequence_of(1, [1, 2, 3, 4])
    lookup.draft([WantedDraft(sequence, 4)], 8)
    assert len(lookup._indexes) == 1
    del sequence
    gc.collect()
    assert len(lookup._indexes) == 0
