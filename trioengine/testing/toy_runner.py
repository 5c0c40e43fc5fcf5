"""Runs steps with the toy model, and refuses those that no scheduler may plan."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import partial
from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.core.grammar import GrammarFailed
from trioengine.core.messages import INVALID_GRAMMAR, SAMPLING_FAILED, TokensRow
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.step_watch import StepWatch
from trioengine.testing.toy_grammar import toy_allowed
from trioengine.testing.toy_model import (
    GREEDY_UP_TO,
    VOCAB_SIZE,
    toy_features,
    toy_logprobs,
    toy_next,
    toy_value,
    toy_vector,
)
from trioengine.testing.toy_states import ToyStates
from trioengine.testing.toy_weights import TOY_PATH, toy_adapted, toy_quantization, toy_weights
from trioengine.testing.toy_windows import ToyWindows
from trioengine.worker.scheduling.images import Tile
from trioengine.worker.scheduling.runner_interface import WantedDraft
from trioengine.worker.scheduling.sequence import (
    BlockCopy,
    BlockTable,
    Limits,
    Sampled,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
)
from trioengine.worker.scheduling.speculation import shared, verified


def _seed_of(params: SamplingParams) -> int:
    """The seed on which the tokens of a request depend: only a hot one is not greedy."""
    return (params.seed or 0) if (params.temperature or 0.0) > GREEDY_UP_TO else 0


class Crash(Exception):
    """A step that a real worker would not survive."""


class ToyRunner:
    """A ModelRunner whose keys and values are `toy_value`s, in the slots that the block tables name.

    It has states where there are slots for them, and layers with windows where there are blocks for these.
    Raises AssertionError for a step that StepWatch refuses, that reads values of another history or of a request with
    another cache salt or adapter, or that encodes a tile twice.
    """

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._tile = limits.tile
        self._watch = StepWatch(limits)
        self._states = ToyStates() if limits.state_slots else None
        self._embeds = limits.embeds
        self._begun: set[Sequence] = set()
        self._newly_begun: list[tuple[int, int, int]] = []
        self._slots: dict[int, int] = {}  # values in slots of the KV cache
        self._windows = ToyWindows(limits) if limits.windows else None
        self._roots: dict[int, tuple[str, int]] = {}  # salt and adapter of the request that computed a slot's value
        self.adapters: dict[int, str] = {}  # paths, by number
        self._weights: int | None = 0  # None: discarded
        self.path = TOY_PATH
        self.asleep: frozenset[Tag] = frozenset()
        self.fail_requests: set[int] = set()  # these fail alone, at their next token
        self.poisoned: Mapping[int, int] = {}  # requests, and how many tokens they get before it crashes
        self.arrivals: Mapping[int, bool] = {}  # requests in order, and whether they have images or a grammar
        self.num_steps = self.num_computed = 0  # steps that were computed, and their tokens
        self.fail_wakes = 0  # so many of the next ones

    def load(self, path: str, asleep: frozenset[Tag]) -> None:
        """Begin with these weights; `asleep` is not there yet."""
        self.path, self.asleep = path, asleep
        self._watch.reset()
        self._weights = None if Tag.WEIGHTS in asleep else toy_weights(path)

    def sleep(self) -> None:
        self._slots.clear()
        self._roots.clear()
        if self._windows is not None:
            self._windows.reset()
        self._watch.reset()
        if self._states is not None:
            self._states.reset()
        self.asleep = ALL_TAGS

    def wake(self, tags: frozenset[Tag]) -> None:
        if self.fail_wakes:
            self.fail_wakes -= 1
            raise ModelError("made not to wake")
        if Tag.WEIGHTS in tags:
            self._weights = toy_weights(self.path)
        self.asleep -= tags

    def update_weights(self, path: str) -> str:
        """A path with a name that begins with `misshapen` has tensors of other shapes."""
        if Path(path).name.startswith("misshapen"):
            raise ModelError(f"{path}: other shapes")
        self.path = path
        self._weights = None if Tag.WEIGHTS in self.asleep else toy_weights(path)
        return toy_quantization(path)

    def prepare(self) -> bool:
        return False

    def load_adapter(self, number: int, path: str) -> None:
        """A path with a name that begins with `misshapen` does not fit."""
        assert not self.asleep, f"an adapter is loaded while {self.asleep} sleep"
        assert number not in self.adapters and path not in self.adapters.values(), f"{path} is loaded twice"
        if Path(path).name.startswith("misshapen"):
            raise ModelError(f"{path}: other shapes")
        self.adapters[number] = path

    def drop_adapter(self, number: int) -> None:
        del self.adapters[number]

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        assert not self.asleep, f"a forward pass while {self.asleep} sleep"
        for entry in output.scheduled:
            num_sampled = entry.sequence.num_output_tokens + len(entry.draft)
            if num_sampled >= self.poisoned.get(entry.sequence.request, math.inf):
                raise Crash
        weights = self._weights
        assert weights is not None, "a forward pass without weights"
        began = self._watch.take(output, self.arrivals)
        self._copy(output.copies)
        if self._states is not None:
            self._states.copy(output.state_copies)
        if self._windows is not None:
            self._windows.copy(output.window_copies)
        for entry in began:
            self._check_prefix(entry.sequence)
            self._begin(entry.sequence)
        for tile in output.encode:
            self._encode(tile, weights)
        sampled: list[Sampled] = []
        for entry in output.scheduled:
            sequence = entry.sequence
            slots = self._slots_of(sequence, len(entry.draft))
            root, computed = (sequence.params.cache_salt, sequence.adapter), sequence.num_computed_tokens
            is_own = {*map(self._roots.get, slots[:computed])} <= {root}
            assert is_own, f"request {sequence.request} reads values computed under another cache salt or adapter"
            embedded = self._embeddings(entry)
            for position, new_token_id in enumerate(entry.new_token_ids, computed):
                before = self._slots[slots[position - 1]] if position else self._first(sequence)
                token_id = embedded.get(position, new_token_id)
                self._slots[slots[position]] = toy_value(token_id, before)
                self._roots[slots[position]] = root
            if self._states is not None:
                self._states.advance(entry, partial(self._value, slots))
            if self._windows is not None:
                self._windows.advance(entry, partial(self._value, slots))
            if not entry.samples:
                sampled += [self._scored(entry, None)] if entry.scores else []
                continue
            if sequence.request in self.fail_requests:
                sampled.append(sequence.failure(SAMPLING_FAILED, "failed on request"))
                continue
            if self._embeds:
                sampled.append(sequence.embedded_row(toy_vector(self._slots[slots[-1]])))
                continue
            rows = [self._sampled(each) for each in entry.sampled_behind]
            row = verified(entry.draft, rows) if entry.draft else rows[0]
            sampled.append(self._scored(entry, row) if entry.scores and isinstance(row, TokensRow) else row)
        self.num_steps += 1
        self.num_computed += output.num_tokens
        return sampled

    def _value(self, slots: list[int], position: int) -> int:
        return self._slots[slots[position]]

    def _sampled(self, sequence: Sequence) -> Sampled:
        """Sample behind its last token."""
        values = array("L", map(self._slots.__getitem__, self._slots_of(sequence)))
        token_id, top = toy_next(values, _seed_of(sequence.params)), sequence.params.logprobs
        if sequence.constraint is not None:
            is_short = sequence.num_output_tokens < sequence.params.min_tokens
            unwanted = sequence.eos_token_ids.union(sequence.params.stop_token_ids) if is_short else ()
            try:
                token_id = toy_allowed(token_id, sequence.constraint.allowed(), unwanted)
            except GrammarFailed as exc:
                return sequence.failure(INVALID_GRAMMAR, f"grammar: {exc}")
        return sequence.row(token_id, None if top is None else toy_logprobs(token_id, top))

    def draft(self, wanted: Items[WantedDraft], room: int) -> list[tuple[int, ...]]:
        """Draft the tokens that follow; one in three is wrong."""
        shares = shared([each.most for each in wanted], room)
        return [self._drafted(each.sequence, share) for each, share in zip(wanted, shares, strict=True)]

    def _drafted(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        slots = self._slots_of(sequence)[: sequence.num_tokens - 1]
        values, draft = array("L", map(self._slots.__getitem__, slots)), [sequence.token_ids[-1]]
        for _ in range(most):
            values.append(toy_value(draft[-1], values[-1] if values else self._first(sequence)))
            token_id = toy_next(values, _seed_of(sequence.params))
            draft.append((token_id + (values[-1] % 3 == 0)) % VOCAB_SIZE)
        return tuple(draft[1:])

    @staticmethod
    def _scored(entry: ScheduledSequence, row: TokensRow | None) -> TokensRow:
        sequence, top = entry.sequence, entry.sequence.params.prompt_logprobs or 0
        return sequence.scored_row(row, tuple(toy_logprobs(sequence.token_ids[each], top) for each in entry.scores))

    def _begin(self, sequence: Sequence) -> None:
        if sequence not in self._begun:  # else it was preempted
            self._begun.add(sequence)
            self._newly_begun.append((sequence.request, sequence.num_tokens, sequence.num_computed_tokens))

    def take_begun(self) -> list[tuple[int, int, int]]:
        """Return the requests that were begun since the last call, with their tokens and those that were computed."""
        begun, self._newly_begun = self._newly_begun, []
        return begun

    def _first(self, sequence: Sequence) -> int:
        """The value before a sequence's first token."""
        assert self._weights is not None, "a step without weights"
        return toy_adapted(self._weights, self.adapters[sequence.adapter] if sequence.adapter else None)

    def _check_prefix(self, sequence: Sequence) -> None:
        """Check that the values which a sequence begins with, from the prefix cache, belong to its own history."""
        value, computed = self._first(sequence), sequence.num_computed_tokens
        for position in range(computed if sequence.images is None else 0):
            value = toy_value(sequence.token_ids[position], value)
            found = self._slots.get(self._slot(sequence.block_table, position))
            assert found == value, (
                f"request {sequence.request} begins with {computed} cached tokens, of which number {position} "
                f"is {'of another history' if found is not None else 'not computed'}"
            )

    def _encode(self, tile: Tile, weights: int) -> None:
        picture, number = tile
        assert self._tile is not None, "an image for a model that takes none"
        assert not tile.is_encoded, "a tile is encoded twice"
        assert isinstance(picture.tiles, list), "a tile is encoded that is not decoded"
        picture.features[number] = toy_features(picture.tiles[number], self._tile.num_tokens, weights)

    def _embeddings(self, entry: ScheduledSequence) -> dict[int, int]:
        """By position."""
        found: dict[int, int] = {}
        for tile, start, stop, offset in entry.tile_pieces:
            features = tile.picture.features[tile.number]
            assert isinstance(features, list), "a tile is computed that is not encoded"
            found.update(enumerate(features[start:stop], entry.sequence.num_computed_tokens + offset))
        return found

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        size = self._block_size
        held = [[self._slots[source * size + offset] for offset in range(count)] for source, _, count in copies]
        roots = [[self._roots[source * size + offset] for offset in range(count)] for source, _, count in copies]
        for (_, target, _), values, computed_under in zip(copies, held, roots, strict=True):
            behind = [0] * (size - len(values))
            self._slots.update(enumerate(values + behind, target * size))
            self._roots.update(enumerate(computed_under, target * size))

    def _slots_of(self, sequence: Sequence, num_drafted: int = 0) -> list[int]:
        """Of all its tokens, and of so many drafted ones."""
        size = self._block_size
        slots = [slot for block in sequence.block_table for slot in range(block * size, (block + 1) * size)]
        num_tokens = sequence.num_tokens + num_drafted
        assert len(slots) >= num_tokens, f"request {sequence.request} has too few blocks for its tokens"
        return slots[:num_tokens]

    def _slot(self, block_table: BlockTable, position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size
