"""The tensors of one step: its tokens, laid out for one forward pass."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trioengine.core.errors import InvariantError
from trioengine.core.messages import NO_ADAPTER
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels.adapters import AdaptedRows, LoadedAdapter
from trioengine.worker.scheduling.sequence import BlockTable, ScheduledSequence, SchedulerOutput
from trioengine.worker.scheduling.sequence import Sequence as TokenSequence
from trioengine.worker.scheduling.state_slots import PADDING_SLOT

IntArray = npt.NDArray[np.int64]
# The number of leading blocks that were given back, and the other blocks.
HeldBlocks: TypeAlias = tuple[int, BlockTable]


class Padding:
    """Fills steps up to a few sizes: those in which each sequence computes one token, and draws the next.

    A row of padding is the first token of a sequence whose block no other has, and whose states are in PADDING_SLOT.
    """

    def __init__(self, sizes: Sequence[int], block: int) -> None:
        """`sizes` are numbers of rows, ascending; `block` of the KV cache is the padding's."""
        self.sizes, self._block = sizes, block
        params = ResolvedParams(temperature=0.0, seed=0)
        self._row = ScheduledSequence(TokenSequence(0, 0, [0], 1, params, frozenset(), block_table=[block]), 1)

    def of_size(self, size: int) -> Padding:
        """The same for one size."""
        return Padding((size,), self._block)

    def rows_for(self, scheduled: Sequence[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
        """The rows to add to this step: none unless each sequence computes one token and draws the next."""
        count = len(scheduled)
        size = next((size for size in self.sizes if size >= count), count)
        is_decode = all(entry.num_new_tokens == 1 and entry.samples and not entry.scores for entry in scheduled)
        return (self._row,) * (size - count) if is_decode else ()


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows of a batch with embeddings of their own, such as an image's, in place of their tokens'."""

    rows: Tensor  # [num_rows], int64, each of them once
    values: Tensor  # [num_rows, hidden_size], in the model's dtype

    def to(self, device: torch.device) -> EmbeddedRows:
        return EmbeddedRows(self.rows.to(device), self.values.to(device))


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the states of a batch's sequences are, in its order; all int64."""

    slots: Tensor  # [num_seqs]
    first_rows: Tensor  # [num_seqs + 1]: of each sequence's tokens, and the number of tokens
    sequences: Tensor  # [num_tokens]: the index of each token's sequence
    saves: Tensor  # [num_saves, 3]: a sequence, a number of its new tokens, and the slot for the state behind them

    def to(self, device: torch.device) -> StateRows:
        tensors = (self.slots, self.first_rows, self.sequences, self.saves)
        return StateRows(*(tensor.to(device) for tensor in tensors))


@dataclass(frozen=True, slots=True)
class WindowTables:
    """The blocks of layers with windows. In place of those behind the windows a table has the sequence's last one."""

    slot_mapping: Tensor  # [num_tokens], int64
    block_tables: IntArray  # [num_seqs, max_blocks]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A step's tokens, flat: first the sequences with one new token, longest context first, then the others.

    Rows of padding are the last of the former. Nothing here depends on the attention backend.
    """

    token_ids: Tensor  # [num_tokens], int64
    positions: Tensor  # [num_tokens], int64
    slot_mapping: Tensor  # [num_tokens], int64: block * block_size + offset
    sample_rows: Tensor  # [num_samples], int64: rows of the sampled tokens, in the scheduler's order, then the padding
    block_tables: IntArray  # [num_seqs, max_blocks], padded with a block of the sequence
    query_lens: IntArray  # [num_seqs]: new tokens
    context_lens: IntArray  # [num_seqs]: tokens before them and new ones
    num_decodes: int  # sequences with one new token
    block_size: int
    embeddings: EmbeddedRows | None = None  # None: every row has its token's
    score_rows: Tensor | None = None  # [num_scores], int64: rows before tokens of prompts that get logprobs
    states: StateRows | None = None  # of a model that has states
    num_padding: int = 0  # rows
    adapters: AdaptedRows | None = None  # None: no row has one
    windowed: WindowTables | None = None  # None: all layers share their blocks

    def in_windows(self) -> ForwardBatch:
        """The same batch for layers that have blocks of windows. Raises InvariantError where it has no such tables."""
        tables = self.windowed
        if tables is None:
            raise InvariantError("the KV cache has blocks of windows, and the step has no tables of these")
        return replace(self, slot_mapping=tables.slot_mapping, block_tables=tables.block_tables, windowed=None)

    @property
    def output_rows(self) -> Tensor:
        """The rows that logits are computed of: those that are sampled, then those that score prompts."""
        return self.sample_rows if self.score_rows is None else torch.cat([self.sample_rows, self.score_rows])

    @property
    def packed(self) -> Tensor:
        """Token ids, positions, slots and sample rows, one behind the other: int64."""
        return torch.cat([self.token_ids, self.positions, self.slot_mapping, self.sample_rows])

    def with_packed(self, packed: Tensor) -> ForwardBatch:
        """The same batch with views of a tensor that is `packed` like its own."""
        sizes = [len(part) for part in (self.token_ids, self.positions, self.slot_mapping, self.sample_rows)]
        token_ids, positions, slots, sample_rows = torch.split(packed, sizes)
        return replace(self, token_ids=token_ids, positions=positions, slot_mapping=slots, sample_rows=sample_rows)

    def to(self, device: torch.device) -> ForwardBatch:
        """The same batch on that device, in few copies."""
        if self.token_ids.device == device:
            return self
        moved, windowed = self.with_packed(self.packed.to(device)), self.windowed
        return replace(
            moved,
            windowed=None if windowed is None else replace(windowed, slot_mapping=windowed.slot_mapping.to(device)),
            embeddings=None if self.embeddings is None else self.embeddings.to(device),
            score_rows=None if self.score_rows is None else self.score_rows.to(device),
            states=None if self.states is None else self.states.to(device),
            adapters=None if self.adapters is None else self.adapters.to(device),
        )

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token, and draws the next, and no token is an image's or has an adapter."""
        is_plain = self.embeddings is None and self.score_rows is None and self.adapters is None
        return is_plain and self.num_decodes == len(self.token_ids) == len(self.sample_rows)

    @property
    def num_samples(self) -> int:
        """The rows of logits that tokens are sampled from: the first ones."""
        return len(self.sample_rows) - self.num_padding


def make_batch(
    output: SchedulerOutput,
    block_size: int,
    padding: Padding | None = None,
    adapters: Mapping[int, LoadedAdapter] | None = None,
) -> ForwardBatch:
    """Lay out a step, in host memory; the scheduler guarantees that the block tables cover it.

    `adapters` are those that are loaded, by their numbers; None: the sequences' adapters are left out.
    """
    rows = padding.rows_for(output.scheduled) if padding is not None else ()
    scheduled = (*output.scheduled, *rows)
    order = sorted(range(len(scheduled)), key=lambda i: _layout_key(scheduled[i]))
    entries = [scheduled[i] for i in order]
    query_lens = [entry.num_new_tokens for entry in entries]
    ends = list(accumulate(query_lens))
    starts = [end - count for end, count in zip(ends, query_lens, strict=True)]
    spans = [_new_positions(entry) for entry in entries]
    held = [(0, entry.sequence.block_table) for entry in entries]
    windowed = [(entry.sequence.num_behind, entry.sequence.window_table) for entry in entries]
    have_windows = bool(windowed[0][1])
    first_rows = dict(zip(order, starts, strict=True))
    samples = [
        first_rows[i] + row
        for i, entry in enumerate(scheduled)
        if entry.samples
        for row in range(entry.num_new_tokens - 1 - len(entry.draft), entry.num_new_tokens)
    ]
    return ForwardBatch(
        token_ids=_tensor(_new_token_ids(entries)),
        positions=_tensor([*chain.from_iterable(spans)]),
        slot_mapping=_slots(held, spans, block_size),
        sample_rows=_tensor(samples),
        block_tables=_block_tables(held, spans, block_size),
        query_lens=np.array(query_lens, dtype=np.int64),
        context_lens=np.array([span.stop for span in spans], dtype=np.int64),
        num_decodes=query_lens.count(1),
        block_size=block_size,
        embeddings=_embeddings(entries, starts),
        score_rows=_score_rows(scheduled, first_rows),
        states=_state_rows(entries, query_lens, ends) if _have_states(output.scheduled) else None,
        num_padding=len(rows),
        adapters=None if adapters is None else _adapted_rows(entries, query_lens, adapters),
        windowed=_window_tables(windowed, spans, block_size) if have_windows else None,
    )


def _layout_key(entry: ScheduledSequence) -> tuple[bool, int]:
    return entry.num_new_tokens > 1, -entry.sequence.num_computed_tokens


def _new_token_ids(entries: list[ScheduledSequence]) -> list[int]:
    ids: list[int] = []
    for entry in entries:
        ids += entry.new_token_ids
    return ids


def _new_positions(entry: ScheduledSequence) -> range:
    computed = entry.sequence.num_computed_tokens
    return range(computed, computed + entry.num_new_tokens)


def _slots(held: list[HeldBlocks], spans: list[range], block_size: int) -> Tensor:
    """The slots [num_tokens] of the new tokens, whose positions in each sequence are `spans`."""
    slots: list[int] = []
    for (num_given_back, blocks), span in zip(held, spans, strict=True):
        position = span.start
        while position < span.stop:
            index = position // block_size
            end = min(span.stop, (index + 1) * block_size)
            shift = (blocks[index - num_given_back] - index) * block_size  # from a position to its slot
            slots += range(position + shift, end + shift)
            position = end
    return _tensor(slots)


def _block_tables(held: list[HeldBlocks], spans: list[range], block_size: int) -> IntArray:
    """[num_seqs, max_blocks]: in place of blocks that were given back, and behind the last one, that one."""
    counts = [-(-span.stop // block_size) for span in spans]
    width = max(counts)
    tables = array("q")
    for (num_given_back, blocks), count in zip(held, counts, strict=True):
        last = blocks[count - num_given_back - 1]
        tables.extend([last] * num_given_back)
        tables.extend(blocks[: count - num_given_back])
        tables.extend([last] * (width - count))
    return np.frombuffer(tables, dtype=np.int64).reshape(len(held), width)


def _window_tables(held: list[HeldBlocks], spans: list[range], block_size: int) -> WindowTables:
    return WindowTables(_slots(held, spans, block_size), _block_tables(held, spans, block_size))


def _embeddings(entries: list[ScheduledSequence], starts: list[int]) -> EmbeddedRows | None:
    """The features of the images' tokens; `starts` are the sequences' first rows."""
    rows: list[int] = []
    values: list[Tensor] = []
    for entry, first in zip(entries, starts, strict=True):
        for (picture, number), start, stop, offset in entry.tile_pieces:
            rows += range(first + offset, first + offset + stop - start)
            values.append(cast("Tensor", picture.features[number])[start:stop])
    return EmbeddedRows(_tensor(rows), torch.cat(values)) if values else None


def _score_rows(scheduled: Sequence[ScheduledSequence], starts: Mapping[int, int]) -> Tensor | None:
    """In the scheduler's order; `starts` are the sequences' first rows."""
    rows: list[int] = []
    for index, entry in enumerate(scheduled):
        before = starts[index] - entry.sequence.num_computed_tokens - 1
        rows += [before + token for token in entry.scores]
    return _tensor(rows) if rows else None


def _have_states(scheduled: Sequence[ScheduledSequence]) -> bool:
    return bool(scheduled) and all(entry.sequence.state_slot != PADDING_SLOT for entry in scheduled)


def _adapted_rows(
    entries: list[ScheduledSequence], query_lens: list[int], adapters: Mapping[int, LoadedAdapter]
) -> AdaptedRows | None:
    wanted = [entry.sequence.adapter for entry in entries]
    if not any(wanted):
        return None
    ids = sorted({*wanted} - {NO_ADAPTER})
    numbers = {NO_ADAPTER: 0} | {adapter: number for number, adapter in enumerate(ids, start=1)}
    choices = np.repeat([numbers[adapter] for adapter in wanted], query_lens)
    return AdaptedRows([adapters[adapter] for adapter in ids], torch.from_numpy(choices))


def _state_rows(entries: list[ScheduledSequence], query_lens: list[int], ends: list[int]) -> StateRows:
    """`ends`: for each sequence the number of rows up to its last one."""
    slots = [entry.sequence.state_slot for entry in entries]
    saves = [
        (index, save.num_tokens - entry.sequence.num_computed_tokens, save.slot)
        for index, entry in enumerate(entries)
        for save in entry.saves
    ]
    return StateRows(
        slots=_tensor(slots),
        first_rows=_tensor([0, *ends]),
        sequences=torch.from_numpy(np.repeat(np.arange(len(entries)), query_lens)),
        saves=torch.tensor(saves, dtype=torch.int64).view(-1, 3),
    )


def _tensor(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
