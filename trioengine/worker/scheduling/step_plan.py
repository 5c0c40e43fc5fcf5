"""A step in the making: what it computes and encodes, and what it can still take."""

from __future__ import annotations

from trioengine.worker.scheduling.block_manager import BlockManager
from trioengine.worker.scheduling.output import ScheduledSequence, SchedulerOutput
from trioengine.worker.scheduling.pictures import Tile
from trioengine.worker.scheduling.sequence import Sequence


class StepPlan:
    """`prompt_tokens` and `tiles` are left for prompts."""

    def __init__(self, prompt_tokens: int, tiles: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.tiles = tiles
        self.scheduled: list[ScheduledSequence] = []
        self._encode: dict[Tile, None] = {}

    def fit(self, sequence: Sequence, start: int) -> int:
        """How many tokens of the prompt from `start` on: up to the first tile that cannot be encoded in this step."""
        num_new_tokens = min(sequence.num_tokens - start, self.prompt_tokens)
        if sequence.images is None:
            return num_new_tokens
        tiles = self.tiles
        for tile, _, _, offset in sequence.images.pieces(start, start + num_new_tokens):
            if not tile.is_encoded and tile not in self._encode:
                if tiles == 0:
                    return offset
                tiles -= 1
        return num_new_tokens

    def add_prompt(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Compute what `fit` has found to fit."""
        entry = ScheduledSequence(sequence, num_new_tokens)
        self.scheduled.append(entry)
        self.prompt_tokens -= num_new_tokens
        for tile, _, _, _ in entry.tile_pieces:
            if not tile.is_encoded and tile not in self._encode:
                self._encode[tile] = None
                self.tiles -= 1

    def output(self, blocks: BlockManager) -> SchedulerOutput:
        return SchedulerOutput(tuple(self.scheduled), blocks.take_copies(), tuple(self._encode))
