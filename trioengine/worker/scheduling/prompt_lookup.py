"""Prompt lookup: drafts from a sequence's own tokens (Saxena 2023).

Where its latest tokens occurred before, the tokens that followed then may follow again.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

from trioengine.worker.scheduling.runner_interface import WantedDraft
from trioengine.worker.scheduling.sequence import Sequence
from trioengine.worker.scheduling.speculation import shared

NGRAM = 3  # tokens that have to occur before
INDEXED_A_STEP = 4096  # tokens, of a long prompt; no draft is made until all are indexed


class NgramIndex:
    """The places of each n-gram in the tokens of one sequence."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # the place behind the latest occurrence of each n-gram
        self._num_indexed = NGRAM  # tokens: n-grams that end before the last of them are in the index

    def continued(self, token_ids: Items[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow the sequence's tokens, which only grow between calls."""
        size = len(token_ids)
        indexed = min(size, self._num_indexed + INDEXED_A_STEP)
        for place in range(self._num_indexed, indexed):
            self._behind[tuple(token_ids[place - NGRAM : place])] = place
        self._num_indexed = max(NGRAM, indexed)
        if indexed < size:
            return []
        start = self._behind.get(tuple(token_ids[-NGRAM:]))
        if start is None:
            return []
        draft: list[int] = []
        for source in range(start, start + most):
            # a draft that reaches the end of the sequence goes on with its own beginning
            draft.append(token_ids[source] if source < size else draft[source - size])
        return draft


class PromptLookup:
    """A Drafter with an index for each sequence, as long as that lives."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Sequence, NgramIndex] = WeakKeyDictionary()

    def draft(self, wanted: Items[WantedDraft], room: int) -> list[tuple[int, ...]]:
        """Return a draft for each sequence, empty where its latest tokens are new."""
        found = [self._continued(*each) for each in wanted]
        shares = shared([len(draft) for draft in found], room)
        return [tuple(draft[:share]) for draft, share in zip(found, shares, strict=True)]

    def _continued(self, sequence: Sequence, most: int) -> list[int]:
        if sequence not in self._indexes:
            self._indexes[sequence] = NgramIndex()
        return self._indexes[sequence].continued(sequence.token_ids, most)
