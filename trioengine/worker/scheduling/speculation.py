"""Speculation: drafts of the next tokens, which one step verifies together.

A draft is found in the sequence itself, as prompt lookup does (Saxena 2023): where its latest tokens occurred before,
the tokens that followed then may follow again. The step computes the draft behind the latest token, and samples at
every place as if the tokens before it were the answer. Sampled tokens are kept up to the first that differs from the
draft. Seed and position fix each draw: where a token's logits do not depend on the others in its step, the answer is
the one without drafts, in fewer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trioengine.core.messages import RequestFailed, TokensRow
from trioengine.core.sampling_params import MAX_SPECULATIVE_TOKENS

NGRAM = 3  # tokens that have to occur before
FIRST_DRAFT = 4  # tokens
INDEXED_A_STEP = 4096  # tokens, of a long prompt; until all are indexed there is no draft
LONGEST_PAUSE = 64  # steps without a draft, after drafts of which nothing was kept


class PromptLookup:
    """Drafts the tokens of one sequence from its own.

    Drafts double in length while they are kept in whole, and shrink to the part that was kept. A draft of which nothing
    was kept begins a pause, twice as long as the one before: text without repetitions costs next to nothing.
    """

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}  # the place behind the latest occurrence of each n-gram
        self._num_indexed = NGRAM  # tokens: n-grams that end before the last of them are in the index
        self._length = FIRST_DRAFT
        self._pause = 0  # steps that are left of it
        self._next_pause = 1  # steps

    def draft(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow the sequence's tokens, which only grow between calls."""
        if self._pause:
            self._pause -= 1
            return ()
        size = len(token_ids)
        indexed = min(size, self._num_indexed + INDEXED_A_STEP)
        for place in range(self._num_indexed, indexed):
            self._behind[tuple(token_ids[place - NGRAM : place])] = place
        self._num_indexed = max(NGRAM, indexed)
        if indexed < size:
            return ()
        start = self._behind.get(tuple(token_ids[-NGRAM:]))
        if start is None:
            return ()
        draft: list[int] = []
        for source in range(start, start + min(self._length, most)):
            # a draft that reaches the end of the sequence goes on with its own beginning
            draft.append(token_ids[source] if source < size else draft[source - size])
        return tuple(draft)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Take in how many tokens of a draft were kept."""
        if num_accepted == num_drafted:
            self._length = min(2 * self._length, MAX_SPECULATIVE_TOKENS)
        else:
            self._length = max(1, num_accepted)
        if num_accepted:
            self._next_pause = 1
        else:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)


def verified(draft: Iterable[int], rows: Iterable[TokensRow | RequestFailed]) -> TokensRow | RequestFailed:
    """Join the tokens sampled behind a sequence, and behind each token of its draft, up to the first difference.

    A failure behind the draft ends it as well: the next step finds it again at a place that is the answer's.
    """
    sampled = iter(rows)
    row = next(sampled)
    if isinstance(row, RequestFailed):
        return row
    for token_id, following in zip(draft, sampled, strict=True):
        if row.token_ids[-1] != token_id or isinstance(following, RequestFailed):
            break
        row.token_ids.extend(following.token_ids)
        if row.logprobs is not None:
            row.logprobs += following.logprobs or ()
    return row
