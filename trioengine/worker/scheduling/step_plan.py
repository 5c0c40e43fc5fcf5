"""A step being planned."""

from __future__ import annotations

from trioengine.worker.scheduling.images import Tile
from trioengine.worker.scheduling.runner_interface import Drafter, WantedDraft
from trioengine.worker.scheduling.sequence import Limits, ScheduledSequence, Sequence
from trioengine.worker.scheduling.state_slots import StateSave

MAX_SCORES = 1024  # tokens of prompts that get their logprobs in one step: some 300 KiB of a frame
MAX_DRAFTED_STEP = 16  # tokens of a step with drafts: in larger ones a drafted token costs as much as a sampled one


class StepPlan:
    """A step being planned; it has room for `prompt_tokens`, `tiles` and logprobs of `scores` tokens more."""

    def __init__(self, prompt_tokens: int, tiles: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.tiles = tiles
        self.scores = MAX_SCORES
        self.scheduled: list[ScheduledSequence] = []
        self.encode: dict[Tile, None] = {}  # an ordered set

    def fit(self, sequence: Sequence, start: int) -> int:
        """How many tokens of the prompt from `start` on: up to the first tile or logprobs beyond the step's room."""
        num_new_tokens = min(sequence.num_tokens - start, self.prompt_tokens)
        scores = sequence.scores(start, start + num_new_tokens)
        if len(scores) > self.scores:
            num_new_tokens = scores.start + self.scores - 1 - start
        if sequence.images is None:
            return num_new_tokens
        tiles = self.tiles
        for tile, _, _, offset in sequence.images.pieces(start, start + num_new_tokens):
            if not tile.is_encoded and tile not in self.encode:
                if tiles == 0:
                    return offset
                tiles -= 1
        return num_new_tokens

    def add_forced(self, num_decodes: int) -> None:
        """Let the first entries, the decodes, compute their forced tokens too, in the room that prompts have left.

        With more than one token a decode counts as a chunk of a prompt.
        """
        for index, entry in enumerate(self.scheduled[:num_decodes]):
            sequence = entry.sequence
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, self.prompt_tokens)
            if num_tokens > 1:
                self.scheduled[index] = ScheduledSequence(sequence, num_tokens)
                self.prompt_tokens -= num_tokens

    def add_drafts(self, num_decodes: int, limits: Limits, drafter: Drafter) -> None:
        """Let the first entries, the decodes, verify drafts in the room that is left, and in blocks that they have.

        With a draft a decode counts as a chunk of a prompt.
        """
        free = MAX_DRAFTED_STEP - sum(entry.num_new_tokens for entry in self.scheduled)
        if min(free, self.prompt_tokens - 1) <= 0:
            return
        wanted: dict[int, WantedDraft] = {}
        for index, entry in enumerate(self.scheduled[:num_decodes]):
            most = _most_drafted(entry.sequence, limits)
            if entry.sequence.pace is not None and most > 0 and (length := entry.sequence.pace.length(most)):
                wanted[index] = WantedDraft(entry.sequence, length)
        if not wanted:
            return
        drafts = drafter.draft([*wanted.values()], min(free, self.prompt_tokens - len(wanted)))
        for (index, (sequence, _)), draft in zip(wanted.items(), drafts, strict=True):
            if draft:
                self.scheduled[index] = ScheduledSequence(sequence, 1 + len(draft), draft)
                self.prompt_tokens -= 1 + len(draft)

    def add_prompt(self, sequence: Sequence, num_new_tokens: int, saves: tuple[StateSave, ...]) -> None:
        """Schedule as many tokens as `fit` has returned."""
        entry = ScheduledSequence(sequence, num_new_tokens, saves=saves)
        self.scheduled.append(entry)
        self.prompt_tokens -= num_new_tokens
        self.scores -= len(entry.scores)
        for tile, _, _, _ in entry.tile_pieces:
            if not tile.is_encoded and tile not in self.encode:
                self.encode[tile] = None
                self.tiles -= 1


def _most_drafted(sequence: Sequence, limits: Limits) -> int:
    """How many tokens may be drafted by its parameters, by the length of its answer, and in the blocks that it has."""
    return min(
        sequence.params.num_speculative_tokens,
        sequence.num_tokens_left(limits.max_sequence_len) - 1,
        len(sequence.block_table) * limits.block_size - sequence.num_tokens,
    )
