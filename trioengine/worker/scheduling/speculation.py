"""Speculation: drafts of the next tokens, which one step verifies together.

A drafter proposes tokens: prompt lookup (prompt_lookup.py), or a draft model (runner/draft_model.py). The step computes
the draft behind the latest token, and samples at every place as if the tokens before it were the answer. Sampled tokens
are kept up to the first that differs from the draft. Seed and position fix each draw: where a token's logits do not
depend on the others in its step, the answer is the one without drafts, in fewer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trioengine.core.messages import RequestFailed, TokensRow
from trioengine.core.sampling_params import MAX_SPECULATIVE_TOKENS

FIRST_DRAFT = 4  # tokens
LONGEST_PAUSE = 64  # steps without a draft, after drafts of which nothing was kept


class Pace:
    """How many tokens of one sequence are drafted.

    Drafts double in length while they are kept in whole, and shrink to the part that was kept. After the second draft
    in a row of which nothing was kept there is a pause of one step, and after each further one a pause twice as long:
    where drafts are wrong they cost next to nothing.
    """

    def __init__(self) -> None:
        self._length = FIRST_DRAFT
        self._pause = 0  # steps that are left of it
        self._next_pause = 0  # steps

    def length(self, most: int) -> int:
        """Return how many tokens to draft in this step, up to `most`; it is called once a step."""
        if self._pause:
            self._pause -= 1
            return 0
        return min(self._length, most)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Take in how many tokens of a draft were kept."""
        if num_accepted == num_drafted:
            self._length = min(2 * self._length, MAX_SPECULATIVE_TOKENS)
        else:
            self._length = max(1, num_accepted)
        if num_accepted:
            self._next_pause = 0
        else:
            self._pause, self._next_pause = self._next_pause, min(max(1, 2 * self._next_pause), LONGEST_PAUSE)


def shared(wanted: Sequence[int], room: int) -> list[int]:
    """Return how many tokens of the room each gets: first one for each that wants any, then a second one, and so on."""
    shares = [0] * len(wanted)
    for size in range(max(wanted, default=0)):
        for index, most in enumerate(wanted):
            if most > size and room > 0:
                shares[index] += 1
                room -= 1
    return shares


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
