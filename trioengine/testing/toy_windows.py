"""The blocks of windows of the toy model: a layer whose values are the tokens' own, of which a query sees the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioengine.worker.scheduling.sequence import BlockCopy, Limits, ScheduledSequence


class ToyWindows:
    """Raises AssertionError where a token would see a block of windows that has the values of other tokens."""

    def __init__(self, limits: Limits) -> None:
        self._block_size, self._window = limits.block_size, limits.windows.size
        self._slots: dict[int, int] = {}

    def reset(self) -> None:
        """Lose all values."""
        self._slots.clear()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Read all sources, then write the targets."""
        size = self._block_size
        held = [[self._slots.get(source * size + offset) for offset in range(count)] for source, _, count in copies]
        for (_, target, count), values in zip(copies, held, strict=True):
            for offset, value in enumerate(values):
                assert value is not None, f"block {target} gets {count} tokens, of which number {offset} is not there"
                self._slots[target * size + offset] = value

    def advance(self, entry: ScheduledSequence, value: Callable[[int], int]) -> None:
        """Check the values that an entry's tokens see, and store theirs; `value`: of a token, by position."""
        sequence, computed = entry.sequence, entry.sequence.num_computed_tokens
        for position in range(max(0, computed + 1 - self._window), computed):
            found = self._slots.get(self._slot(entry, position))
            assert found == value(position), (
                f"request {sequence.request} sees something else {computed - position} tokens before it"
            )
        for position in range(computed, computed + entry.num_new_tokens):
            self._slots[self._slot(entry, position)] = value(position)

    def _slot(self, entry: ScheduledSequence, position: int) -> int:
        size, sequence = self._block_size, entry.sequence
        return sequence.window_table[position // size - sequence.num_behind] * size + position % size
