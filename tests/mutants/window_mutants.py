"""Mutants of the blocks of windows."""

from __future__ import annotations

from typing import Any

from mutant import Mutant, replaced

from trioengine.worker.scheduling.block_manager import BlockManager, Prefix
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus


def _give_back_what_is_seen(drop_behind: Any) -> Any:
    def mutant(self: BlockManager, sequence: Sequence) -> None:
        drop_behind(self, sequence)
        if self._has_windows and len(sequence.window_table) > 1:
            self.windowed.give_back(sequence.window_table[:1])
            sequence.window_table[0] = sequence.window_table[1]
            self.windowed.hold(sequence.window_table[:1])

    return mutant


def _take_the_latest_block(with_windows: Any) -> Any:
    """Where a block that is seen is missing, another one is taken for it."""

    def mutant(self: BlockManager, sequence: Sequence, prefix: Prefix) -> Prefix:
        found: Prefix = with_windows(self, sequence, prefix)
        if found.num_tokens == prefix.num_tokens or not self.windowed.contents:
            return found
        count = len(prefix.blocks)
        first = self._first_kept(count * self.block_size)
        latest = next(reversed(self.windowed.contents))
        blocks = tuple(self.windowed.find(self._digest(sequence, index + 1)) for index in range(first, count))
        window_blocks = tuple(latest if block is None else block for block in blocks)
        return Prefix(prefix.blocks, num_tokens=count * self.block_size, window_blocks=window_blocks)

    return mutant


def _lose_blocks_of_the_preempted(release: Any) -> Any:
    def mutant(self: BlockManager, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING and sequence.num_computed_tokens < sequence.num_prompt_tokens:
            del sequence.window_table[:]
        release(self, sequence)

    return mutant


WINDOW_MUTANTS = (
    Mutant(
        "F107",
        "a block of a window is given back while tokens see it",
        replaced(BlockManager, "drop_behind", _give_back_what_is_seen),
        shows="sees something else|a block of windows twice|writes blocks",
    ),
    Mutant(
        "F108",
        "a prefix is found although a block of its window is gone",
        replaced(BlockManager, "_with_windows", _take_the_latest_block),
        shows="sees something else|a block of windows twice|writes blocks",
    ),
    Mutant(
        "F109",
        "a prompt that is aborted in its middle loses its blocks of windows",
        replaced(BlockManager, "release", _lose_blocks_of_the_preempted),
        shows="blocks of windows|none of them can be scheduled|blocks are counted|of [0-9]+ blocks",
    ),
)
